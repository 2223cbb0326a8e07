"""Random models of the real classes at sizes where a step is arithmetic: what a block costs without published weights.

    flux-like   4 double + 8 single blocks, width 768; 1024 image tokens at 512 px, 256 at 256 px, 128 of text
    sana-like   10 blocks, width 1152; 1024 image tokens at 1024 px, 256 at 512 px, 128 of text

Only the transformer has weights. Of the VAE there is the config, which says how many latent pixels a picture has.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxTransformer2DModel, SanaTransformer2DModel
from torch import nn
from transformers import AutoTokenizer, Gemma2Config, Gemma2Model

from blockskip import builtin
from blockskip.families import Text, family_of
from blockskip.loading.source import ModelSource
from blockskip.planner.named import FOLDER, open_for_plan
from blockskip.planner.parts import empty_part

TEXT_LENGTH = 128

_FLUX = {
    "patch_size": 1, "in_channels": 64, "num_layers": 4, "num_single_layers": 8, "attention_head_dim": 64,
    "num_attention_heads": 12, "joint_attention_dim": 1024, "pooled_projection_dim": 768, "guidance_embeds": False,
    "axes_dims_rope": (16, 24, 24),
}  # fmt: skip
_SANA = {
    "in_channels": 32, "out_channels": 32, "num_attention_heads": 36, "attention_head_dim": 32, "num_layers": 10,
    "num_cross_attention_heads": 18, "cross_attention_head_dim": 64, "cross_attention_dim": 1152,
    "caption_channels": 1024, "mlp_ratio": 2.5, "sample_size": 32, "patch_size": 1,
}  # fmt: skip
#: Class, its arguments, the VAE's config and the full resolution of each model.
MODELS: dict[str, tuple[Any, dict[str, Any], dict[str, Any], int]] = {
    "flux-like": (FluxTransformer2DModel, _FLUX, {"block_out_channels": [1] * 4, "latent_channels": 16}, 512),
    "sana-like": (SanaTransformer2DModel, _SANA, {"encoder_block_out_channels": [1] * 6, "latent_channels": 32}, 1024),
}


def write_model(name: str, folder: Path) -> ModelSource:
    """Write a random transformer (float32) to a folder and give it as the source of a model.

    Args:
        name: of ``MODELS``.
    """
    transformer_class, arguments, vae, full_resolution = MODELS[name]
    torch.manual_seed(0)
    transformer_class(**arguments).save_pretrained(folder / "transformer")
    (folder / "vae").mkdir()
    (folder / "vae" / "config.json").write_text(json.dumps(vae), encoding="utf-8")
    settings = {"full_resolution": full_resolution, "call": {"max_sequence_length": TEXT_LENGTH}}
    return ModelSource(name, folder, family_of(transformer_class.__name__), settings)


def write_sana(folder: Path) -> Path:
    """Write a whole SANA-0.6B pipeline of random bfloat16 weights, 1.9 GB, to a folder, and return the folder.

    Transformer and autoencoder have their published sizes. The text encoder has the published width (2304) and two
    layers, with the tokenizer of the built-in SANA.
    """
    name = "Efficient-Large-Model/Sana_600M_1024px_diffusers"
    published, own = FOLDER / name.replace("/", "--"), builtin.model_path("builtin-sana")
    for part in ("tokenizer", "scheduler"):
        shutil.copytree(own / part, folder / part)
    shutil.copyfile(own / "model_index.json", folder / "model_index.json")
    for part in ("transformer", "vae"):
        model = empty_part(open_for_plan(str(published))[0], part, torch.bfloat16)
        _fill(model).save_pretrained(folder / part)
        del model
    width = json.loads((published / "transformer" / "config.json").read_text(encoding="utf-8"))["caption_channels"]
    config = Gemma2Config(
        vocab_size=len(AutoTokenizer.from_pretrained(own / "tokenizer")), hidden_size=width, intermediate_size=width,
        num_hidden_layers=2,
    )  # fmt: skip
    Gemma2Model(config).to(torch.bfloat16).save_pretrained(folder / "text_encoder")
    return folder


def _fill(model: nn.Module) -> nn.Module:
    """Random values, small enough for many layers, in the place of parameters without memory."""
    torch.manual_seed(0)
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None:
                filled = torch.randn(value.shape, dtype=value.dtype) * 0.02
                module._parameters[name] = nn.Parameter(filled, requires_grad=False)
    return model


def random_text(source: ModelSource, seed: int) -> Text:
    """Conditioning tensors (1, ...) as ``encode_text`` gives them, at the model's text length."""
    generator = torch.Generator().manual_seed(seed)
    config, length = source.config("transformer"), source.text_length
    if source.family.name == "flux":
        shapes = {
            "prompt_embeds": (1, length, config["joint_attention_dim"]),
            "pooled_prompt_embeds": (1, config["pooled_projection_dim"]),
        }
        return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    mask = (torch.arange(length) < max(1, length // 2)).to(torch.int64)[None]
    embeds = torch.randn((1, length, config["caption_channels"]), generator=generator)
    return {"prompt_embeds": embeds, "prompt_attention_mask": mask}
