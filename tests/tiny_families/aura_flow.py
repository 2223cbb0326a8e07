"""AuraFlow in the tests that run for every family: a tiny random pipeline.

Pixel stride 8 (VAE factor 4, token patch 2), width 32; eight learned tokens ahead of the text.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import AuraFlowPipeline, AuraFlowTransformer2DModel, FlowMatchEulerDiscreteScheduler
from transformers import UMT5Config, UMT5EncoderModel

from blockskip.families import Text
from tests.tiny import kl_autoencoder, narrow_posterior, randomise, t5_tokenizer
from tests.tiny_families.base import TinyFamily


def make_aura_flow(folder: Path, *, layers: int = 3, single_layers: int = 5, seed: int = 0) -> Path:
    """Write an AuraFlowPipeline with `layers` double and `single_layers` single blocks; return `folder`."""
    tokenizer = t5_tokenizer()
    transformer = AuraFlowTransformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_mmdit_layers=layers,
        num_single_dit_layers=single_layers,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        caption_projection_dim=32,
        pos_embed_max_size=24 * 24,
    )
    encoder = UMT5EncoderModel(
        UMT5Config(
            vocab_size=len(tokenizer),
            d_model=24,
            d_kv=12,
            d_ff=48,
            num_layers=2,
            num_heads=2,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    vae = kl_autoencoder(shift_factor=None)
    randomise(transformer, vae, encoder, seed=seed)
    narrow_posterior(vae)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.73)
    pipeline = AuraFlowPipeline(tokenizer, encoder, vae, transformer, scheduler)
    pipeline.save_pretrained(folder)
    return Path(folder)


def random_text(config: Mapping[str, Any], batch: int, length: int, generator: torch.Generator) -> Text:
    """UMT5's tokens."""
    return {"prompt_embeds": torch.randn(batch, length, config["joint_attention_dim"], generator=generator)}


def pipeline_text(pipeline: Any, prompts: Sequence[str], length: int) -> Text:
    """By `AuraFlowPipeline.encode_prompt`."""
    found = pipeline.encode_prompt(list(prompts), do_classifier_free_guidance=False, max_sequence_length=length)
    return {"prompt_embeds": found[0]}


TINY = TinyFamily(
    make_aura_flow, random_text, pipeline_text, plain={"guidance_scale": 1.0}, guided={"guidance_scale": 3.0},
    rounding=1,
)  # fmt: skip
