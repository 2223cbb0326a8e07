"""LongCat-Image in the tests that run for every family: a tiny random pipeline with a vision-language text encoder.

Pixel stride 8 (VAE factor 4 with the 16 channels that the pipeline takes for granted, token patch 2), width 32. What
the pipeline says around a prompt has as many tokens as the published tokenizer makes of it: 36 ahead and 5 after.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, LongCatImagePipeline, LongCatImageTransformer2DModel

from blockskip.families import Text
from tests.tiny import kl_autoencoder, narrow_posterior, randomise
from tests.tiny_families.base import TinyFamily
from tests.tiny_families.flux import unpacked
from tests.tiny_families.qwen_image import qwen_encoder, qwen_tokenizer

WIDTH = 32  # of the language model
#: Words around a prompt, as the tokenizer parts them ("Ġ" is a space).
WORDS = (
    "system", "As", "Ġan", "Ġimage", "Ġcaption", "Ġexpert", "Ġgenerate", "Ġdescriptive", "Ġtext", "Ġprompt", "Ġbased",
    "Ġon", "Ġcontent", "Ġsuitable", "Ġfor", "Ġinput", "Ġto", "-to", "-image", "Ġmodel", "user", "assistant", "Ġa",
    "ing",
)  # fmt: skip


def make_longcat_image(folder: Path, *, layers: int = 3, single_layers: int = 3, seed: int = 0) -> Path:
    """Write a LongCatImagePipeline with `layers` double and `single_layers` single blocks; return `folder`.

    Its tokenizer stands for the processor of prompts and pictures too, which is there to write prompts anew.
    """
    tokenizer = qwen_tokenizer(WORDS)
    transformer = LongCatImageTransformer2DModel(
        in_channels=64,
        num_layers=layers,
        num_single_layers=single_layers,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        axes_dims_rope=[4, 6, 6],
    )
    vae, encoder = kl_autoencoder(channels=16), qwen_encoder(tokenizer, WIDTH)
    randomise(transformer, vae, encoder, seed=seed)
    narrow_posterior(vae)
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15)
    pipeline = LongCatImagePipeline(scheduler, vae, encoder, tokenizer, tokenizer, transformer)
    pipeline.save_pretrained(folder)
    return Path(folder)


def random_text(config: Mapping[str, Any], batch: int, length: int, generator: torch.Generator) -> Text:
    """The language model's tokens."""
    return {"prompt_embeds": torch.randn(batch, length, config["joint_attention_dim"], generator=generator)}


def take_length(pipeline: Any, length: int) -> dict[str, Any]:
    """The pipeline has no option for it."""
    pipeline.tokenizer_max_length = length
    return {}


def pipeline_text(pipeline: Any, prompts: Sequence[str], length: int) -> Text:
    """By `LongCatImagePipeline.encode_prompt`."""
    take_length(pipeline, length)
    return {"prompt_embeds": pipeline.encode_prompt(list(prompts))[0]}


def load_lora(pipeline: Any, folder: Path) -> None:
    """Into the transformer, as the pipeline loads none."""
    pipeline.transformer.load_lora_adapter(folder, weight_name="pytorch_lora_weights.safetensors")


TINY = TinyFamily(
    make_longcat_image, random_text, pipeline_text, plain={"guidance_scale": 1.0, "enable_prompt_rewrite": False},
    guided={"guidance_scale": 3.0}, length=take_length, unpacked=unpacked, load_lora=load_lora,
)  # fmt: skip
