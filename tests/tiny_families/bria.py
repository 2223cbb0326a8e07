"""Bria 3.2 in the tests that run for every family: a tiny random pipeline.

Pixel stride 8 (VAE factor 4, token patch 2), width 32.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import BriaPipeline, BriaTransformer2DModel, FlowMatchEulerDiscreteScheduler

from blockskip.families import Text
from tests.tiny import kl_autoencoder, narrow_posterior, randomise, t5_encoder, t5_tokenizer
from tests.tiny_families.base import TinyFamily
from tests.tiny_families.flux import unpacked
from tests.tiny_families.longcat_image import load_lora


def make_bria(folder: Path, *, layers: int = 3, single_layers: int = 3, seed: int = 0) -> Path:
    """Write a BriaPipeline with `layers` double and `single_layers` single blocks; return `folder`."""
    tokenizer = t5_tokenizer()
    transformer = BriaTransformer2DModel(
        in_channels=16,
        num_layers=layers,
        num_single_layers=single_layers,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        axes_dims_rope=[4, 6, 6],
    )
    vae, encoder = kl_autoencoder(shift_factor=0.0), t5_encoder(tokenizer, 24)
    randomise(transformer, vae, encoder, seed=seed)
    narrow_posterior(vae)
    pipeline = BriaPipeline(transformer, FlowMatchEulerDiscreteScheduler(shift=3.0), vae, encoder, tokenizer)
    pipeline.save_pretrained(folder)
    return Path(folder)


def random_text(config: Mapping[str, Any], batch: int, length: int, generator: torch.Generator) -> Text:
    """T5's tokens."""
    return {"prompt_embeds": torch.randn(batch, length, config["joint_attention_dim"], generator=generator)}


def pipeline_text(pipeline: Any, prompts: Sequence[str], length: int) -> Text:
    """By `BriaPipeline.encode_prompt`; an empty prompt is the one against which the pipeline guides."""
    found = pipeline.encode_prompt(list(prompts), max_sequence_length=length)
    empty = torch.tensor([not prompt for prompt in prompts])
    return {"prompt_embeds": torch.where(empty[:, None, None], found[1], found[0])}


TINY = TinyFamily(
    make_bria, random_text, pipeline_text, plain={"guidance_scale": 1.0}, guided={"guidance_scale": 3.0}, rounding=1,
    unpacked=unpacked, load_lora=load_lora,
)  # fmt: skip
