"""FLUX.1 in the tests that run for every family; its tiny pipeline is that of `tests.tiny`."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from blockskip.families import Text
from tests.tiny import make_flux
from tests.tiny_families.base import TinyFamily


def random_text(config: Mapping[str, Any], batch: int, length: int, generator: torch.Generator) -> Text:
    """T5's tokens and CLIP's pooled vector."""
    shapes = {
        "prompt_embeds": (batch, length, config["joint_attention_dim"]),
        "pooled_prompt_embeds": (batch, config["pooled_projection_dim"]),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def pipeline_text(pipeline: Any, prompts: Sequence[str], length: int) -> Text:
    """By `FluxPipeline.encode_prompt`."""
    embeds, pooled, _ = pipeline.encode_prompt(list(prompts), None, max_sequence_length=length)
    return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}


def unpacked(pipeline: Any, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """From the pipeline's tokens of 2x2 latent pixels."""
    found: torch.Tensor = pipeline._unpack_latents(latents, height, width, pipeline.vae_scale_factor)
    return found


TINY = TinyFamily(
    make_flux, random_text, pipeline_text, guided={"true_cfg_scale": 3.0, "negative_prompt": ""}, unpacked=unpacked,
)  # fmt: skip
