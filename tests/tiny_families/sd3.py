"""Stable Diffusion 3 in the tests that run for every family: a tiny random pipeline like 3.5, and one without T5.

Pixel stride 8 (VAE factor 4, token patch 2), width 32.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

from blockskip.families import Text
from tests.tiny import clip_tokenizer, kl_autoencoder, narrow_posterior, randomise, t5_encoder, t5_tokenizer
from tests.tiny_families.base import TinyFamily

CLIP_LENGTH = 77


def make_sd3(folder: Path, *, layers: int = 6, with_t5: bool = True, seed: int = 0) -> Path:
    """Write a StableDiffusion3Pipeline with `layers` blocks; return `folder`.

    It is built like 3.5 medium (image-only attention in the first two blocks, norms of queries and keys); without T5
    like 3 medium with that encoder left out.
    """
    folder = Path(folder)
    tokenizers = [clip_tokenizer(folder / "tokenizer"), clip_tokenizer(folder / "tokenizer_2", pad_token="!")]
    transformer = SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=layers,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=40,
        caption_projection_dim=32,
        pooled_projection_dim=12 + 20,
        pos_embed_max_size=24,
        dual_attention_layers=(0, 1) if with_t5 else (),
        qk_norm="rms_norm" if with_t5 else None,
    )
    vae = kl_autoencoder()
    clips = [clip_encoder(tokenizers[0], 12, "quick_gelu"), clip_encoder(tokenizers[1], 20, "gelu")]
    t5 = t5_encoder(t5_tokenizer(), 40) if with_t5 else None
    randomise(transformer, vae, *clips, *([t5] if t5 else []), seed=seed)
    narrow_posterior(vae)
    pipeline = StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae,
        text_encoder=clips[0],
        tokenizer=tokenizers[0],
        text_encoder_2=clips[1],
        tokenizer_2=tokenizers[1],
        text_encoder_3=t5,
        tokenizer_3=t5_tokenizer() if with_t5 else None,
    )
    pipeline.save_pretrained(folder)
    return folder


def clip_encoder(
    tokenizer: CLIPTokenizer, width: int, activation: str, length: int = CLIP_LENGTH
) -> CLIPTextModelWithProjection:
    """CLIP with two layers that gives vectors of `width`, for texts of at most `length` tokens."""
    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=2 * width,
            projection_dim=width,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=length,
            hidden_act=activation,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def random_text(config: Mapping[str, Any], batch: int, length: int, generator: torch.Generator) -> Text:
    """Tokens of all encoders, and the pooled vectors of both CLIPs."""
    shapes = {
        "prompt_embeds": (batch, length, config["joint_attention_dim"]),
        "pooled_prompt_embeds": (batch, config["pooled_projection_dim"]),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def pipeline_text(pipeline: Any, prompts: Sequence[str], length: int) -> Text:
    """By `StableDiffusion3Pipeline.encode_prompt`."""
    embeds, _, pooled, _ = pipeline.encode_prompt(
        list(prompts), None, None, do_classifier_free_guidance=False, max_sequence_length=length
    )
    return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}


TINY = TinyFamily(
    make_sd3, random_text, pipeline_text, plain={"guidance_scale": 1.0}, guided={"guidance_scale": 3.0}, rounding=1,
    deaf=("attn.add_q_proj", "attn.to_add_out"),
)  # fmt: skip
