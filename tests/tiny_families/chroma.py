"""Chroma in the tests that run for every family: a tiny random pipeline.

Pixel stride 8 (VAE factor 4, token patch 2), width 32.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import ChromaPipeline, ChromaTransformer2DModel, FlowMatchEulerDiscreteScheduler

from blockskip.families import Text
from tests.tiny import kl_autoencoder, narrow_posterior, randomise, t5_encoder, t5_tokenizer
from tests.tiny_families.base import TinyFamily, ragged_mask
from tests.tiny_families.flux import unpacked


def make_chroma(folder: Path, *, layers: int = 3, single_layers: int = 5, seed: int = 0) -> Path:
    """Write a ChromaPipeline with `layers` double and `single_layers` single blocks; return `folder`."""
    tokenizer = t5_tokenizer()
    transformer = ChromaTransformer2DModel(
        in_channels=16,
        num_layers=layers,
        num_single_layers=single_layers,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        axes_dims_rope=(4, 6, 6),
        approximator_num_channels=16,
        approximator_hidden_dim=32,
        approximator_layers=2,
    )
    vae, encoder = kl_autoencoder(), t5_encoder(tokenizer, 24)
    randomise(transformer, vae, encoder, seed=seed)
    narrow_posterior(vae)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15)
    pipeline = ChromaPipeline(scheduler, vae, encoder, tokenizer, transformer)
    pipeline.save_pretrained(folder)
    return Path(folder)


def random_text(config: Mapping[str, Any], batch: int, length: int, generator: torch.Generator) -> Text:
    """T5's tokens and a ragged mask, a number."""
    embeds = torch.randn(batch, length, config["joint_attention_dim"], generator=generator)
    return {"prompt_embeds": embeds, "prompt_attention_mask": ragged_mask(batch, length).float()}


def pipeline_text(pipeline: Any, prompts: Sequence[str], length: int) -> Text:
    """By `ChromaPipeline.encode_prompt`."""
    found = pipeline.encode_prompt(list(prompts), do_classifier_free_guidance=False, max_sequence_length=length)
    return {"prompt_embeds": found[0], "prompt_attention_mask": found[2]}


TINY = TinyFamily(
    make_chroma, random_text, pipeline_text, plain={"guidance_scale": 1.0}, guided={"guidance_scale": 3.0},
    unpacked=unpacked, padding_read=True,
)  # fmt: skip
