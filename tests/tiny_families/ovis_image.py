"""Ovis-Image in the tests that run for every family: a tiny random pipeline.

Pixel stride 8 (VAE factor 4, token patch 2), width 32. Each word of the pipeline's request is one token.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, OvisImagePipeline, OvisImageTransformer2DModel
from transformers import Qwen3Config, Qwen3Model

from blockskip.families import Text
from tests.tiny import kl_autoencoder, narrow_posterior, randomise
from tests.tiny_families.base import TinyFamily
from tests.tiny_families.flux import unpacked
from tests.tiny_families.flux2 import QWEN_TEMPLATE
from tests.tiny_families.longcat_image import load_lora
from tests.tiny_families.qwen_image import WORDS, qwen_tokenizer

WIDTH = 48  # of the language model


def make_ovis_image(folder: Path, *, layers: int = 3, single_layers: int = 3, seed: int = 0) -> Path:
    """Write an OvisImagePipeline with `layers` double and `single_layers` single blocks; return `folder`."""
    tokenizer = qwen_tokenizer(WORDS)
    tokenizer.chat_template = QWEN_TEMPLATE
    transformer = OvisImageTransformer2DModel(
        in_channels=16,
        out_channels=16,
        num_layers=layers,
        num_single_layers=single_layers,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        axes_dims_rope=(4, 6, 6),
    )
    encoder = Qwen3Model(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=WIDTH // 2,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    vae = kl_autoencoder()
    randomise(transformer, vae, encoder, seed=seed)
    narrow_posterior(vae)
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15)
    OvisImagePipeline(scheduler, vae, encoder, tokenizer, transformer).save_pretrained(folder)
    return Path(folder)


def random_text(config: Mapping[str, Any], batch: int, length: int, generator: torch.Generator) -> Text:
    """The language model's tokens."""
    return {"prompt_embeds": torch.randn(batch, length, config["joint_attention_dim"], generator=generator)}


def pipeline_text(pipeline: Any, prompts: Sequence[str], length: int) -> Text:
    """By `OvisImagePipeline.encode_prompt`."""
    found = pipeline.encode_prompt(list(prompts), do_classifier_free_guidance=False, max_sequence_length=length)
    return {"prompt_embeds": found[0]}


TINY = TinyFamily(
    make_ovis_image, random_text, pipeline_text, plain={"guidance_scale": 1.0}, guided={"guidance_scale": 3.0},
    unpacked=unpacked, load_lora=load_lora,
)  # fmt: skip
