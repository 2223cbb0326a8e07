"""Latents as tokens of 2x2 latent pixels, and the sampler's shift by their number (FLUX.1, Qwen-Image)."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.pipelines.flux.pipeline_flux import calculate_shift


def pack_tokens(latents: torch.Tensor) -> torch.Tensor:
    """Tokens (B, h/2 * w/2, 4C), row by row, of latents (B, C, h, w)."""
    batch, channels, height, width = latents.shape
    tokens = latents.reshape(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return tokens.reshape(batch, (height // 2) * (width // 2), channels * 4)


def unpack_tokens(tokens: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The inverse of ``pack_tokens``, in the shape of the latents ``like`` (B, C, h, w)."""
    batch, channels, height, width = like.shape
    parted = tokens.reshape(batch, height // 2, width // 2, channels, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return parted.reshape(batch, channels, height, width)


def shift_by_tokens(scheduler: Any, tokens: int, max_shift: float = 1.15) -> float:
    """``mu`` of a picture of a number of image tokens, from the scheduler's config.

    Args:
        max_shift: what the pipeline takes where the config has none.
    """
    names = {"base_image_seq_len": 256, "max_image_seq_len": 4096, "base_shift": 0.5, "max_shift": max_shift}
    return float(calculate_shift(tokens, *(scheduler.config.get(name, default) for name, default in names.items())))
