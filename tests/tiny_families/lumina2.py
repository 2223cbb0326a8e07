"""Lumina-Image 2.0 in the tests that run for every family: a tiny random pipeline.

Pixel stride 16 (VAE factor 8, which the pipeline takes for granted, token patch 2), width 32. The instruction ahead of
every prompt is one token.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, Lumina2Pipeline, Lumina2Transformer2DModel

from blockskip.families import Text
from tests.tiny import gemma_encoder, gemma_tokenizer, kl_autoencoder, narrow_posterior, randomise
from tests.tiny_families.base import TinyFamily

INSTRUCTION = (
    "You are an assistant designed to generate superior images with the superior degree of image-text alignment based "
    "on textual prompts or user prompts."
)


def make_lumina2(folder: Path, *, layers: int = 6, seed: int = 0) -> Path:
    """Write a Lumina2Pipeline with `layers` blocks; return `folder`."""
    folder = Path(folder)
    tokenizer = gemma_tokenizer()
    tokenizer.add_tokens([INSTRUCTION, "<Prompt Start>"])
    transformer = Lumina2Transformer2DModel(
        sample_size=16,
        in_channels=4,
        hidden_size=32,
        num_layers=layers,
        num_refiner_layers=1,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=16,
        axes_dim_rope=(4, 6, 6),
        axes_lens=(512, 64, 64),
        cap_feat_dim=24,
    )
    vae, gemma = kl_autoencoder(levels=4), gemma_encoder(tokenizer, 24)
    randomise(transformer, vae, gemma, seed=seed)
    narrow_posterior(vae)
    pipeline = Lumina2Pipeline(transformer, FlowMatchEulerDiscreteScheduler(shift=6.0), vae, gemma, tokenizer)
    pipeline.save_pretrained(folder)
    return folder


def random_text(config: Mapping[str, Any], batch: int, length: int, generator: torch.Generator) -> Text:
    """Gemma's tokens, without padding."""
    return {"prompt_embeds": torch.randn(batch, length, config["cap_feat_dim"], generator=generator)}


def pipeline_text(pipeline: Any, prompts: Sequence[str], length: int) -> Text:
    """By `Lumina2Pipeline.encode_prompt`, without the padding that all prompts share; zeros in the place of the rest.

    An empty prompt is the one against which the pipeline guides.
    """
    found = pipeline.encode_prompt(list(prompts), True, max_sequence_length=length)
    empty = torch.tensor([not prompt for prompt in prompts])
    embeds = torch.where(empty[:, None, None], found[2], found[0])
    mask = torch.where(empty[:, None], found[3], found[1])
    longest = int(mask.sum(1).max())
    embeds, mask = embeds[:, :longest], mask[:, :longest]
    if bool(mask.all()):
        return {"prompt_embeds": embeds}
    return {"prompt_embeds": embeds * mask[:, :, None], "prompt_embeds_mask": mask}


TINY = TinyFamily(
    make_lumina2, random_text, pipeline_text, plain={"guidance_scale": 1.0}, guided={"guidance_scale": 3.0}, rounding=1,
)  # fmt: skip
