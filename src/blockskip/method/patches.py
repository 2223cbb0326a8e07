"""Dynamic patch sampling: the side of the crop follows the noise level (Eq. 1)."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
import torch.nn.functional as F

Direction = Literal["low-to-high", "high-to-low", "random", "fixed"]
DIRECTIONS: tuple[str, ...] = get_args(Direction)


def patch_side(
    sigma: float, s_min: int, s_max: int, stride: int, direction: Direction = "low-to-high", u: float = 0.0
) -> int:
    """Eq. 1: f(s_min, s_max, t) = s_min + t/T * (s_max - s_min), rounded to a multiple of the stride.

    Noisy samples see a large patch and teach structure; clean ones a small patch and fine detail.

    Args:
        sigma: noise level t/T in [0, 1].
        s_min, s_max: training and full resolution in pixels.
        stride: the model's pixel stride; the result is a multiple of it, at least ``s_min`` and at most ``s_max``
            rounded down to the stride.
        direction: ``low-to-high`` is the paper's; ``high-to-low`` takes 1 - sigma, ``random`` takes ``u`` in its
            place; ``fixed`` is always ``s_max`` (the whole picture, resized).
        u: a uniform number in [0, 1), used by ``random`` only.

    Raises:
        ValueError: sigma outside [0, 1], s_min above s_max, or no multiple of the stride between them.
    """
    if not 0 <= sigma <= 1:
        raise ValueError(f"sigma lies in [0, 1], not {sigma}")
    low, high = -(-s_min // stride) * stride, s_max // stride * stride
    if not 0 < low <= high:
        raise ValueError(f"no patch side that is a multiple of {stride} lies between {s_min} and {s_max}")
    share = {"low-to-high": sigma, "high-to-low": 1 - sigma, "random": u, "fixed": 1.0}[direction]
    side = math.floor((s_min + share * (s_max - s_min)) / stride + 0.5) * stride
    return min(max(side, low), high)


def aspect_size(area_side: int, aspect: float, stride: int) -> tuple[int, int]:
    """(width, height) in pixels, multiples of the stride, of about ``area_side`` squared at width / height = aspect."""
    width = max(stride, math.floor(area_side * math.sqrt(aspect) / stride + 0.5) * stride)
    height = max(stride, math.floor(area_side / math.sqrt(aspect) / stride + 0.5) * stride)
    return width, height


def place_box(size: tuple[int, int], patch: tuple[int, int], u: tuple[float, float]) -> tuple[int, int, int, int]:
    """A box (left, top, width, height) of the patch's size, placed uniformly inside a picture of a size.

    Args:
        size: (width, height) of the picture in pixels.
        patch: (width, height) of the patch.
        u: two uniform numbers in [0, 1).

    Raises:
        ValueError: the patch is larger than the picture.
    """
    free = size[0] - patch[0], size[1] - patch[1]
    if min(free) < 0:
        raise ValueError(f"a patch of {patch[0]}x{patch[1]} does not fit in a picture of {size[0]}x{size[1]}")
    return int(u[0] * (free[0] + 1)), int(u[1] * (free[1] + 1)), patch[0], patch[1]


def cut_patch(pixels: torch.Tensor, box: tuple[int, int, int, int], size: tuple[int, int]) -> torch.Tensor:
    """The patch inside a box, resized to the training size with antialiasing.

    Args:
        pixels: (3, H, W) float32 in [-1, 1].
        box: (left, top, width, height) in pixels, inside the picture.
        size: (width, height) to resize to.

    Returns:
        (3, height, width) float32 in [-1, 1].

    Raises:
        ValueError: the box does not lie inside the picture.
    """
    left, top, width, height = box
    if left < 0 or top < 0 or left + width > pixels.shape[-1] or top + height > pixels.shape[-2]:
        raise ValueError(f"box {box} leaves a picture of {pixels.shape[-1]}x{pixels.shape[-2]}")
    patch = pixels[:, top : top + height, left : left + width]
    if (width, height) == size:
        return patch.clone()
    resized = F.interpolate(patch[None], size=(size[1], size[0]), mode="bicubic", antialias=True, align_corners=False)
    return resized[0].clamp(-1, 1)
