"""PixArt-Sigma and PixArt-Alpha in the tests that run for every family: a tiny random pipeline of each.

Pixel stride 8 (VAE factor 4, token patch 2), width 32. Neither pipeline loads LoRA itself; PEFT does.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    PixArtAlphaPipeline,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
)
from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict
from safetensors import safe_open

from blockskip.families import Text
from tests.tiny import kl_autoencoder, narrow_posterior, randomise, t5_encoder, t5_tokenizer
from tests.tiny_families.base import TinyFamily, ragged_mask


def make_pixart(folder: Path, *, layers: int = 6, alpha: bool = False, told_size: bool = False, seed: int = 0) -> Path:
    """Write a PixArtSigmaPipeline with `layers` blocks and the scheduler of the published models; return `folder`.

    With `alpha` it is a PixArtAlphaPipeline. With `told_size` the model is told the picture's size, as PixArt-Alpha of
    1024 px is, and the autoencoder has the published factor of 8.
    """
    folder = Path(folder)
    tokenizer = t5_tokenizer()
    transformer = PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=18 if told_size else 16,  # a third of the width for each of three embeddings
        in_channels=4,
        out_channels=8,
        num_layers=layers,
        cross_attention_dim=36 if told_size else 32,
        sample_size=128 if told_size else 16,
        interpolation_scale=2,
        caption_channels=24,
        use_additional_conditions=told_size,
    )
    vae = kl_autoencoder(levels=4 if told_size else 3, shift_factor=None)
    t5 = t5_encoder(tokenizer, 24)
    randomise(transformer, vae, t5, seed=seed)
    narrow_posterior(vae)
    scheduler = DPMSolverMultistepScheduler(beta_start=0.0001, beta_end=0.02, beta_schedule="linear")
    pipeline = (PixArtAlphaPipeline if alpha else PixArtSigmaPipeline)(tokenizer, t5, vae, transformer, scheduler)
    pipeline.save_pretrained(folder)
    return folder


def random_text(config: Mapping[str, Any], batch: int, length: int, generator: torch.Generator) -> Text:
    """T5's tokens and a ragged mask."""
    embeds = torch.randn(batch, length, config["caption_channels"], generator=generator)
    return {"prompt_embeds": embeds, "prompt_attention_mask": ragged_mask(batch, length)}


def pipeline_text(pipeline: Any, prompts: Sequence[str], length: int) -> Text:
    """By the pipeline's `encode_prompt`."""
    embeds, mask, _, _ = pipeline.encode_prompt(list(prompts), False, max_sequence_length=length)
    return {"prompt_embeds": embeds, "prompt_attention_mask": mask}


def load_lora(pipeline: Any, folder: Path) -> None:
    """By PEFT, from what the file's header says."""
    with safe_open(folder / "pytorch_lora_weights.safetensors", framework="pt") as file:
        state = {name.removeprefix("transformer."): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        values = json.loads(file.metadata()["lora_adapter_metadata"])
    options = {name.removeprefix("transformer."): value for name, value in values.items()}
    inject_adapter_in_model(LoraConfig(**options), pipeline.transformer)
    set_peft_model_state_dict(pipeline.transformer, state)


SIGMA, ALPHA = (
    TinyFamily(
        partial(make_pixart, alpha=alpha), random_text, pipeline_text,
        plain={"clean_caption": False, "use_resolution_binning": False, "guidance_scale": 1.0},
        guided={"guidance_scale": 3.0}, rounding=1, load_lora=load_lora,
    )
    for alpha in (False, True)
)  # fmt: skip
