"""Writes the configs of published models, without weights, for plans where the hub cannot be reached.

    python -m tools.named_models

The values are those of the checkpoints' own config files and of diffusers' conversion scripts; a test holds the
parameter counts against the published sizes.
"""

import json
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

FOLDER = Path("src/blockskip/planner/models")

FLUX_VAE = {
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [128, 256, 512, 512],
    "layers_per_block": 2,
    "latent_channels": 16,
    "sample_size": 1024,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
SD_VAE = FLUX_VAE | {"latent_channels": 4, "sample_size": 512, "scaling_factor": 0.18215, "shift_factor": None}
SD_VAE |= {"use_quant_conv": True, "use_post_quant_conv": True}
SDXL_VAE = SD_VAE | {"sample_size": 1024, "scaling_factor": 0.13025}
SD3_VAE = FLUX_VAE | {"scaling_factor": 1.5305, "shift_factor": 0.0609}
DC_AE = {
    "latent_channels": 32,
    "attention_head_dim": 32,
    "encoder_block_types": ["ResBlock"] * 3 + ["EfficientViTBlock"] * 3,
    "decoder_block_types": ["ResBlock"] * 3 + ["EfficientViTBlock"] * 3,
    "encoder_block_out_channels": [128, 256, 512, 512, 1024, 1024],
    "decoder_block_out_channels": [128, 256, 512, 512, 1024, 1024],
    "encoder_layers_per_block": [2, 2, 2, 3, 3, 3],
    "decoder_layers_per_block": [3, 3, 3, 3, 3, 3],
    "encoder_qkv_multiscales": [[], [], [], [5], [5], [5]],
    "decoder_qkv_multiscales": [[], [], [], [5], [5], [5]],
    "downsample_block_type": "conv",
    "upsample_block_type": "interpolate",
    "scaling_factor": 0.41407,
}
CLIP_L = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
CLIP_L |= {"projection_dim": 768, "vocab_size": 49408}
CLIP_G: dict[str, Any] = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
}
CLIP_G |= {"projection_dim": 1280, "vocab_size": 49408, "hidden_act": "gelu"}
T5_XXL: dict[str, Any] = {
    "d_model": 4096,
    "d_ff": 10240,
    "d_kv": 64,
    "num_heads": 64,
    "num_layers": 24,
    "vocab_size": 32128,
}
T5_XXL |= {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
GEMMA = {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8}
GEMMA |= {"num_key_value_heads": 4, "head_dim": 256, "vocab_size": 256000, "query_pre_attn_scalar": 256}
QWEN_TEXT: dict[str, Any] = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
}
QWEN_TEXT |= {"num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 128000}
QWEN_TEXT |= {"rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1000000.0}}
QWEN_VISION = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584}

FLUX_PARTS = {
    "vae": ("AutoencoderKL", FLUX_VAE),
    "text_encoder": ("CLIPTextModel", CLIP_L),
    "text_encoder_2": ("T5EncoderModel", T5_XXL),
}
SANA_PARTS = {"vae": ("AutoencoderDC", DC_AE), "text_encoder": ("Gemma2Model", GEMMA)}
SD3_PARTS = {
    "vae": ("AutoencoderKL", SD3_VAE),
    "text_encoder": ("CLIPTextModelWithProjection", CLIP_L),
    "text_encoder_2": ("CLIPTextModelWithProjection", CLIP_G),
    "text_encoder_3": ("T5EncoderModel", T5_XXL),
}
QWEN_PARTS = {
    "vae": ("AutoencoderKLQwenImage", {}),
    "text_encoder": (
        "Qwen2_5_VLForConditionalGeneration", {"text_config": QWEN_TEXT, "vision_config": QWEN_VISION},
    ),
}  # fmt: skip
QWEN3: dict[str, Any] = {"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
QWEN3 |= {"vocab_size": 151936, "max_position_embeddings": 40960}
QWEN3_4B = QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True}
QWEN3_8B = QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False}
MISTRAL: dict[str, Any] = {"model_type": "mistral", "hidden_size": 5120, "intermediate_size": 32768, "head_dim": 128}
MISTRAL |= {"num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 131072}
PIXTRAL = {"model_type": "pixtral", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
PIXTRAL |= {"num_attention_heads": 16, "image_size": 1540, "patch_size": 14}
LLAMA = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA |= {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072}
UMT5_XL = {"d_model": 2048, "d_ff": 5120, "d_kv": 64, "num_heads": 32, "num_layers": 24, "vocab_size": 32128}
FLUX2_PARTS = {
    "vae": ("AutoencoderKLFlux2", {}),
    "text_encoder": (
        "Mistral3ForConditionalGeneration",
        {"text_config": MISTRAL, "vision_config": PIXTRAL, "tie_word_embeddings": False},
    ),
}
CHROMA_PARTS = {"vae": ("AutoencoderKL", FLUX_VAE), "text_encoder": ("T5EncoderModel", T5_XXL)}
Z_IMAGE_PARTS = {"vae": ("AutoencoderKL", FLUX_VAE), "text_encoder": ("Qwen3Model", QWEN3_4B)}
LUMINA2_PARTS = {"vae": ("AutoencoderKL", FLUX_VAE), "text_encoder": ("Gemma2Model", GEMMA)}
COGVIEW4_VAE = FLUX_VAE | {"scaling_factor": 1.0, "shift_factor": 0.0, "block_out_channels": [128, 512, 1024, 1024]}
COGVIEW4_VAE |= {"layers_per_block": 3, "mid_block_add_attention": False}
COGVIEW4_PARTS = {"vae": ("AutoencoderKL", COGVIEW4_VAE), "text_encoder": ("GlmModel", {})}
AURA_FLOW_PARTS = {"vae": ("AutoencoderKL", SDXL_VAE), "text_encoder": ("UMT5EncoderModel", UMT5_XL)}
PIXART_PARTS = {"text_encoder": ("T5EncoderModel", T5_XXL)}

FLUX = ("FluxPipeline", FLUX_PARTS, "FluxTransformer2DModel")
SANA = ("SanaPipeline", SANA_PARTS, "SanaTransformer2DModel")
SD3 = ("StableDiffusion3Pipeline", SD3_PARTS, "SD3Transformer2DModel")
QWEN = ("QwenImagePipeline", QWEN_PARTS, "QwenImageTransformer2DModel")
PIXART_SIGMA = (
    "PixArtSigmaPipeline", PIXART_PARTS | {"vae": ("AutoencoderKL", SDXL_VAE)}, "PixArtTransformer2DModel",
)  # fmt: skip
PIXART_ALPHA = (
    "PixArtAlphaPipeline", PIXART_PARTS | {"vae": ("AutoencoderKL", SD_VAE)}, "PixArtTransformer2DModel",
)  # fmt: skip
FLUX2 = ("Flux2Pipeline", FLUX2_PARTS, "Flux2Transformer2DModel")
KLEIN_4B, KLEIN_9B = (
    ("Flux2KleinPipeline", FLUX2_PARTS | {"text_encoder": ("Qwen3ForCausalLM", qwen)}, "Flux2Transformer2DModel")
    for qwen in (QWEN3_4B, QWEN3_8B)
)
CHROMA = ("ChromaPipeline", CHROMA_PARTS, "ChromaTransformer2DModel")
Z_IMAGE = ("ZImagePipeline", Z_IMAGE_PARTS, "ZImageTransformer2DModel")
LUMINA2 = ("Lumina2Pipeline", LUMINA2_PARTS, "Lumina2Transformer2DModel")
COGVIEW4 = ("CogView4Pipeline", COGVIEW4_PARTS, "CogView4Transformer2DModel")
#: The CLIPs of HiDream-I1 are made for texts of 248 tokens.
HIDREAM_PARTS = {
    "vae": ("AutoencoderKL", FLUX_VAE),
    "text_encoder": ("CLIPTextModelWithProjection", CLIP_L | {"max_position_embeddings": 248}),
    "text_encoder_2": ("CLIPTextModelWithProjection", CLIP_G | {"max_position_embeddings": 248}),
    "text_encoder_3": ("T5EncoderModel", T5_XXL),
    "text_encoder_4": ("LlamaForCausalLM", LLAMA),
}
HIDREAM = ("HiDreamImagePipeline", HIDREAM_PARTS, "HiDreamImageTransformer2DModel")
AURA_FLOW = ("AuraFlowPipeline", AURA_FLOW_PARTS, "AuraFlowTransformer2DModel")
SANA_SMALL = {"num_attention_heads": 36, "num_layers": 28, "num_cross_attention_heads": 16}
SANA_SMALL |= {"cross_attention_head_dim": 72, "cross_attention_dim": 1152}

#: Hub id: pipeline, its parts, the transformer's class and what differs from that class's defaults.
MODELS: dict[str, tuple[tuple[str, dict[str, Any], str], dict[str, Any]]] = {
    "black-forest-labs/FLUX.1-dev": (FLUX, {"guidance_embeds": True}),
    "black-forest-labs/FLUX.1-schnell": (FLUX, {"guidance_embeds": False}),
    "Efficient-Large-Model/Sana_600M_1024px_diffusers": (SANA, SANA_SMALL),
    "Efficient-Large-Model/Sana_1600M_1024px_diffusers": (SANA, {}),
    "Efficient-Large-Model/SANA1.5_4.8B_1024px_diffusers": (
        SANA, {"num_layers": 60, "qk_norm": "rms_norm_across_heads"},
    ),
    "stabilityai/stable-diffusion-3-medium-diffusers": (
        SD3, {"num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536, "pos_embed_max_size": 192},
    ),
    "stabilityai/stable-diffusion-3.5-medium": (
        SD3,
        {
            "num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536, "pos_embed_max_size": 384,
            "dual_attention_layers": list(range(13)), "qk_norm": "rms_norm",
        },
    ),
    "stabilityai/stable-diffusion-3.5-large": (
        SD3,
        {
            "num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432, "pos_embed_max_size": 192,
            "qk_norm": "rms_norm",
        },
    ),
    "Qwen/Qwen-Image": (QWEN, {}),
    "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS": (
        PIXART_SIGMA, {"caption_channels": 4096, "interpolation_scale": 2, "use_additional_conditions": False},
    ),
    "PixArt-alpha/PixArt-XL-2-1024-MS": (
        PIXART_ALPHA, {"caption_channels": 4096, "interpolation_scale": 2, "use_additional_conditions": True},
    ),
    "black-forest-labs/FLUX.2-dev": (FLUX2, {}),
    "black-forest-labs/FLUX.2-klein-base-4B": (
        KLEIN_4B,
        {
            "num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24, "joint_attention_dim": 7680,
            "guidance_embeds": False,
        },
    ),
    "black-forest-labs/FLUX.2-klein-base-9B": (
        KLEIN_9B,
        {
            "num_layers": 8, "num_single_layers": 24, "num_attention_heads": 32, "joint_attention_dim": 12288,
            "guidance_embeds": False,
        },
    ),
    "Alpha-VLLM/Lumina-Image-2.0": (LUMINA2, {"cap_feat_dim": 2304}),
    "THUDM/CogView4-6B": (
        COGVIEW4, {"num_layers": 28, "num_attention_heads": 32, "attention_head_dim": 128, "out_channels": 16},
    ),
    "lodestones/Chroma1-HD": (CHROMA, {}),
    "Tongyi-MAI/Z-Image-Turbo": (Z_IMAGE, {}),
    "fal/AuraFlow-v0.3": (AURA_FLOW, {"pos_embed_max_size": 9216}),
    "HiDream-ai/HiDream-I1-Full": (
        HIDREAM,
        {
            "patch_size": 2, "in_channels": 16, "caption_channels": [4096, 4096], "axes_dims_rope": [64, 32, 32],
            "llama_layers": [*range(32), *[31] * 16],
        },
    ),
}  # fmt: skip
SD3_SHARED = {
    "sample_size": 128,
    "in_channels": 16,
    "out_channels": 16,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 2048,
}


def write(name: str, folder: Path) -> None:
    """Write `model_index.json` and every part's `config.json`."""
    (pipeline, parts, transformer), changed = MODELS[name]
    if transformer.startswith("SD3"):
        changed = SD3_SHARED | changed
    index: dict[str, Any] = {"_class_name": pipeline}
    for part, (class_name, values) in {**parts, "transformer": (transformer, changed)}.items():
        library = "diffusers" if hasattr(diffusers, class_name) else "transformers"
        index[part] = [library, class_name]
        (folder / part).mkdir(parents=True, exist_ok=True)
        if library == "diffusers":
            with torch.device("meta"):
                config = dict(getattr(diffusers, class_name)(**values).config)
            document = {"_class_name": class_name, **{key: value for key, value in config.items() if key[0] != "_"}}
        else:
            config_class = getattr(transformers, class_name).config_class
            document = config_class(**values).to_diff_dict() | {"architectures": [class_name]}
            document.pop("transformers_version", None)
        text = json.dumps(document, indent=1, sort_keys=True)
        (folder / part / "config.json").write_text(text + "\n", encoding="utf-8")
    (folder / "model_index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for name in MODELS:
        write(name, FOLDER / name.replace("/", "--"))
