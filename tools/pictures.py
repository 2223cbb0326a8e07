"""Puts a sprite on a background: random place, size, turn and flip, with a soft contact shadow."""

from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image, ImageFilter

from tools.backgrounds import PAINTERS

UPRIGHT = {"beach", "meadow", "snow", "desert", "forest", "checkered", "night", "sunset"}
"""Backgrounds that are seen from the side: the object stands in the lower part of the picture."""


def square(sprite: Image.Image) -> Image.Image:
    """The RGBA sprite cut to its visible part, standing at the foot of a square."""
    box = sprite.getchannel("A").point(lambda a: 255 if a > 8 else 0).getbbox()
    sprite = sprite.crop(box)
    side = max(sprite.size)
    canvas = Image.new("RGBA", (side, side))
    canvas.paste(sprite, ((side - sprite.width) // 2, side - sprite.height))
    return canvas


def load_sprite(path: Path) -> Image.Image:
    """The sprite file (SVG drawn at 256 px, or any format of Pillow) as RGBA, cut to what is visible, made square."""
    if path.suffix == ".svg":
        import resvg_py  # only those who compose pictures need it

        path = BytesIO(resvg_py.svg_to_bytes(svg_path=str(path), width=256, height=256))
    return square(Image.open(path).convert("RGBA"))


@dataclass(frozen=True)
class Placement:
    """Where a sprite is: its side and the place of its middle from the left, as shares of the picture's side."""

    size: float
    centre: float

    @property
    def size_word(self) -> str:
        """ "small", "large" or nothing."""
        return "small" if self.size < 0.54 else "large" if self.size > 0.8 else ""

    @property
    def position(self) -> str:
        """ "on the left", "on the right" or nothing."""
        return "on the left" if self.centre < 0.4 else "on the right" if self.centre > 0.6 else ""


def compose(
    rng: np.random.Generator, sprite: Image.Image, background: str, side: int, zoom_share: float = 0.1
) -> np.ndarray:
    """A composite as uint8 RGB of shape (side, side, 3)."""
    return compose_placed(rng, sprite, background, side, zoom_share)[0]


def compose_placed(
    rng: np.random.Generator, sprite: Image.Image, background: str, side: int, zoom_share: float = 0.1
) -> tuple[np.ndarray, Placement]:
    """A composite as uint8 RGB of shape (side, side, 3), drawn at twice the side and scaled down, and the placement."""
    n = 2 * side
    canvas = Image.fromarray((np.clip(PAINTERS[background](rng, n), 0, 1) * 255).astype(np.uint8))
    zoom = rng.random() < zoom_share
    if rng.random() < 0.5:
        sprite = sprite.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    size = int(n * (rng.uniform(0.9, 1.5) if zoom else rng.uniform(0.42, 0.88)))
    sprite = sprite.resize((size, size), Image.Resampling.BILINEAR)
    sprite = sprite.rotate(float(rng.uniform(-8, 8)), Image.Resampling.BILINEAR, expand=True)
    width, height = sprite.size
    if zoom:
        left, top = int(rng.uniform(-0.35, 0.0) * n - (width - n) / 4), int(rng.uniform(-0.35, 0.0) * n)
    else:
        slack = n - size
        left = int(slack * rng.uniform(-0.05, 1.05)) - (width - size) // 2
        low = 0.45 if background in UPRIGHT else 0.0
        top = int(slack * rng.uniform(low, 1.0)) - (height - size) // 2
    shadow(canvas, sprite, left, top, size)
    canvas.paste(sprite, (left, top), sprite)
    placement = Placement(size / n, 0.5 if zoom else (left + width / 2) / n)
    return np.asarray(canvas.resize((side, side), Image.Resampling.BOX)), placement


def shadow(canvas: Image.Image, sprite: Image.Image, left: int, top: int, size: int) -> None:
    """Darkens `canvas` below the sprite: its own outline, flattened, at its foot, blurred."""
    flat = sprite.getchannel("A").resize((sprite.width, max(2, size // 6)), Image.Resampling.BILINEAR)
    radius = max(1, size // 24)
    mask = Image.new("L", (sprite.width + 4 * radius, flat.height + 4 * radius))
    mask.paste(flat, (2 * radius, 2 * radius))
    mask = mask.filter(ImageFilter.BoxBlur(radius)).point(lambda a: int(a * 0.4))
    foot = top + sprite.height - flat.height // 2 - int(0.04 * size)
    canvas.paste((20, 15, 25), (left - 2 * radius, foot - 2 * radius), mask)
