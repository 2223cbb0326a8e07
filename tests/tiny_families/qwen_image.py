"""Qwen-Image in the tests that run for every family: a tiny random pipeline with a vision-language text encoder.

Pixel stride 8 (VAE factor 4, token patch 2), width 32. In the tokenizer each word of the pipeline's template before the
prompt is one token, as in the published one: 34 in all; every other character is its bytes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from tokenizers import pre_tokenizers
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from blockskip.families import Text
from tests.tiny import randomise
from tests.tiny_families.base import TinyFamily, ragged_mask

#: Words of the template, as the tokenizer parts them ("Ġ" is a space).
WORDS = (
    "system", "Describe", "Ġthe", "Ġimage", "Ġby", "Ġdetailing", "Ġcolor", "Ġshape", "Ġsize", "Ġtexture", "Ġquantity",
    "Ġtext", "Ġspatial", "Ġrelationships", "Ġof", "Ġobjects", "Ġand", "Ġbackground", "user",
)  # fmt: skip


def make_qwen_image(folder: Path, *, layers: int = 6, seed: int = 0) -> Path:
    """Write a QwenImagePipeline with `layers` blocks and the scheduler of the published model; return `folder`."""
    folder = Path(folder)
    tokenizer = qwen_tokenizer(WORDS)
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=layers,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        axes_dims_rope=(4, 6, 6),
    )
    vae = AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=[-0.4, 0.1, 0.7, -0.2],
        latents_std=[1.5, 0.8, 2.0, 1.2],
    )
    encoder = qwen_encoder(tokenizer)
    randomise(transformer, vae, encoder, seed=seed)
    with torch.no_grad():
        vae.quant_conv.bias[vae.config.z_dim :] -= 6.0  # a posterior as narrow as a trained one's
        vae.decoder.conv_out.weight.mul_(3.0)  # or all pictures would be nearly grey
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
    )
    pipeline = QwenImagePipeline(scheduler, vae, encoder, tokenizer, transformer)
    pipeline.save_pretrained(folder)
    return folder


def qwen_tokenizer(words: Sequence[str], special: Sequence[str] = ("<|im_start|>", "<|im_end|>")) -> Qwen2Tokenizer:
    """Qwen's byte-level BPE that knows the bytes, some words ("Ġ" is a space) and special tokens."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = []
    for word in words:
        for end in range(1, len(word)):
            merges.append((word[:end], word[end]))
            tokens.append(word[: end + 1])
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=list(dict.fromkeys(merges)))
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    return tokenizer


def qwen_encoder(tokenizer: Qwen2Tokenizer, width: int = 24) -> Qwen2_5_VLForConditionalGeneration:
    """Qwen2.5-VL with two layers that gives vectors of `width`, a multiple of 8."""
    sections = [width // 4 - 2 * (width // 12), width // 12, width // 12]  # of half a head: time, rows, columns
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={
                "vocab_size": len(tokenizer),
                "hidden_size": width,
                "intermediate_size": 2 * width,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections},
                "bos_token_id": None,
                "eos_token_id": tokenizer.eos_token_id,
                "pad_token_id": tokenizer.pad_token_id,
            },
            vision_config={
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_heads": 2,
                "out_hidden_size": width,
                "fullatt_block_indexes": [0],
            },
        )
    )


def random_text(config: Mapping[str, Any], batch: int, length: int, generator: torch.Generator) -> Text:
    """Tokens of the language model and a ragged mask."""
    mask = ragged_mask(batch, length)
    embeds = torch.randn(batch, length, config["joint_attention_dim"], generator=generator) * mask[:, :, None]
    return {"prompt_embeds": embeds, "prompt_embeds_mask": mask}


def pipeline_text(pipeline: Any, prompts: Sequence[str], length: int) -> Text:
    """By `QwenImagePipeline.encode_prompt`, which gives no mask where all prompts are of one length."""
    embeds, mask = pipeline.encode_prompt(list(prompts), max_sequence_length=length)
    return {"prompt_embeds": embeds} | ({} if mask is None else {"prompt_embeds_mask": mask})


def unpacked(pipeline: Any, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """From the pipeline's tokens of 2x2 latent pixels, without the frame."""
    found: torch.Tensor = pipeline._unpack_latents(latents, height, width, pipeline.vae_scale_factor)
    return found[:, :, 0]


TINY = TinyFamily(
    make_qwen_image, random_text, pipeline_text, plain={"true_cfg_scale": 1.0},
    guided={"true_cfg_scale": 3.0, "negative_prompt": " "}, unpacked=unpacked, video=True,
)  # fmt: skip
