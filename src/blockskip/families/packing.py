"""Latents as tokens of 2x2 latent pixels, their places, and the sampler's shift by their number."""

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


def grid_ids(rows: int, columns: int, axes: int, device: torch.device) -> torch.Tensor:
    """Position ids (rows * columns, axes) float32: a token's row in axis 1, its column in axis 2, zero elsewhere."""
    ids = torch.zeros(rows, columns, axes, device=device)
    ids[..., 1] += torch.arange(rows, device=device)[:, None]
    ids[..., 2] += torch.arange(columns, device=device)[None, :]
    return ids.reshape(rows * columns, axes)


def word_ids(count: int, device: torch.device) -> torch.Tensor:
    """Position ids (count, 3) float32 of text tokens: the number of a token in axes 1 and 2."""
    ids = torch.zeros(count, 3, device=device)
    ids[:, 1:] += torch.arange(count, device=device)[:, None]
    return ids


def positions_at(places: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Positions (B, rows * columns, 2) of patches' tokens, row and column, in the token grids of their pictures.

    A token has the position of its centre: (left + (column + 1/2) * width / columns) - 1/2. So whole pictures, and
    patches of the picture's own tokens, have the whole numbers of these tokens.

    Args:
        places: (B, 4) float32: left, top, width and height of the patches in tokens of the picture.
        rows, columns: tokens of which each patch is made.
    """
    left, top, width, height = places[:, :, None].unbind(1)
    down = top + (torch.arange(rows, device=places.device) + 0.5) * (height / rows) - 0.5
    across = left + (torch.arange(columns, device=places.device) + 0.5) * (width / columns) - 0.5
    pair = (down[:, :, None].expand(-1, -1, columns), across[:, None].expand(-1, rows, -1))
    return torch.stack(pair, dim=-1).flatten(1, 2)


def shift_by_tokens(scheduler: Any, tokens: int, max_shift: float = 1.15) -> float:
    """``mu`` of a picture of a number of image tokens, from the scheduler's config.

    Args:
        max_shift: what the pipeline takes where the config has none.
    """
    names = {"base_image_seq_len": 256, "max_image_seq_len": 4096, "base_shift": 0.5, "max_shift": max_shift}
    return float(calculate_shift(tokens, *(scheduler.config.get(name, default) for name, default in names.items())))
