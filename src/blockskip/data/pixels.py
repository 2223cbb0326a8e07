"""Pixels of a picture file: upright, in RGB on white, scaled, in [-1, 1]."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

#: (left, top, width, height) in pixels of the scaled picture.
Box = tuple[int, int, int, int]

#: A scaled picture of more pixels than this (only extreme aspects reach it) is never made as a whole.
LARGEST_WHOLE = 2**25

#: What the brightest value of a mode without a fixed range stands for: the first that is not exceeded.
_RANGES: dict[str, tuple[int, ...]] = {"F": (1, 255, 65535)}


def open_picture(path: Path) -> Image.Image:
    """The first frame of a picture file, turned as its EXIF says, in mode RGB, transparency on white, fully decoded.

    Greyscale of 16 bits is scaled to 8 (65535 becomes 255); float greyscale counts as 0..1, 0..255 or 0..65535,
    whichever its brightest value fits in. Colour profiles are not applied.

    Raises:
        Exception: whatever Pillow raises for a file that is no picture, is damaged, or is a decompression bomb.
    """
    with Image.open(path) as image:
        image.load()
        return _on_white(ImageOps.exif_transpose(image))


def load_pixels(path: Path, size: tuple[int, int], box: Box | None = None) -> torch.Tensor:
    """A picture scaled to a size with Lanczos, or the part of it inside a box.

    Args:
        path: the picture file.
        size: (width, height) in pixels that the whole picture is scaled to.
        box: (left, top, width, height) in the scaled picture; None is all of it.

    Returns:
        (3, height, width) float32 in [-1, 1], contiguous, with memory of its own.

    Raises:
        ValueError: the box does not lie inside the scaled picture.
        Exception: the file cannot be read (see ``open_picture``).
    """
    box = _checked(box, size)
    image = open_picture(path)
    if size[0] * size[1] <= LARGEST_WHOLE:
        return _cut(np.asarray(_resize(image, size, (0, 0, *size))), box)
    return _cut(np.asarray(_resize(image, size, box)), (0, 0, *box[2:]))


class PictureCache:
    """``load_pixels`` that keeps the scaled pictures used last, so that a picture is not decoded for every sample.

    The results are those of ``load_pixels``, bit for bit. Not for several threads. Make one for each run: a file that
    is changed while the cache lives is not read again.

    Args:
        limit: bytes that are kept at most; a scaled picture takes 3 bytes for each pixel.
    """

    def __init__(self, limit: int = 256 * 2**20) -> None:
        self._limit = limit
        self._kept: OrderedDict[tuple[Path, tuple[int, int]], np.ndarray[Any, Any]] = OrderedDict()

    @property
    def size(self) -> int:
        """Bytes that are kept now."""
        return sum(scaled.nbytes for scaled in self._kept.values())

    def __call__(self, path: Path, size: tuple[int, int], box: Box | None = None) -> torch.Tensor:
        """The same as ``load_pixels``."""
        box = _checked(box, size)
        needed = 3 * size[0] * size[1]
        if size[0] * size[1] > LARGEST_WHOLE or needed > self._limit:
            return load_pixels(path, size, box)
        if (path, size) not in self._kept:
            while self._kept and self.size + needed > self._limit:
                self._kept.popitem(last=False)
            self._kept[path, size] = np.asarray(_resize(open_picture(path), size, (0, 0, *size)))
        self._kept.move_to_end((path, size))
        return _cut(self._kept[path, size], box)


def _checked(box: Box | None, size: tuple[int, int]) -> Box:
    left, top, width, height = box = box or (0, 0, *size)
    if min(left, top) < 0 or min(width, height) < 1 or left + width > size[0] or top + height > size[1]:
        raise ValueError(f"box {box} leaves a picture of {size[0]}x{size[1]}")
    return box


def _resize(image: Image.Image, size: tuple[int, int], box: Box) -> Image.Image:
    """The part inside a box of a picture scaled to a size; the pixels around the box take part in the filter."""
    across, down = image.width / size[0], image.height / size[1]
    left, top, width, height = box
    right, bottom = min((left + width) * across, image.width), min((top + height) * down, image.height)
    return image.resize((width, height), Image.Resampling.LANCZOS, box=(left * across, top * down, right, bottom))


def _cut(scaled: np.ndarray[Any, Any], box: Box) -> torch.Tensor:
    """(3, height, width) float32 in [-1, 1] of a box in (H, W, 3) uint8."""
    left, top, width, height = box
    part = np.ascontiguousarray(scaled[top : top + height, left : left + width].transpose(2, 0, 1), dtype=np.float32)
    return torch.from_numpy(part).div_(127.5).sub_(1)


def _on_white(image: Image.Image) -> Image.Image:
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        image = _eight_bits(image)
    if not image.has_transparency_data:
        return image.convert("RGB")
    picture = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")


def _eight_bits(image: Image.Image) -> Image.Image:
    """Greyscale of 16 or 32 bits or float as mode L, or LA when one value stands for transparent."""
    values = np.asarray(image)
    finite = np.nan_to_num(values.astype(np.float32), nan=0, posinf=0, neginf=0)
    peak = float(finite.max(initial=0))
    top = next((top for top in _RANGES.get(image.mode, (65535,)) if peak <= top), peak)
    grey = Image.fromarray(np.floor(finite.clip(0) * (255 / top) + 0.5).clip(0, 255).astype(np.uint8))
    transparent = image.info.get("transparency")
    if not isinstance(transparent, int):
        return grey
    return Image.merge("LA", (grey, Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8))))
