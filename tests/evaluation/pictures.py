"""Pictures made by code: a few clearly different subjects, each in several views."""

from __future__ import annotations

import random

from PIL import Image, ImageDraw


def ball(seed: int) -> Image.Image:
    """A red ball with a white spot on a light ground."""
    image, draw, x, y = _ground(seed, (225, 235, 245))
    draw.ellipse((x, y, x + 60, y + 60), fill=(205, 30, 30))
    draw.ellipse((x + 14, y + 10, x + 26, y + 22), fill="white")
    return image


def stripes(seed: int) -> Image.Image:
    """A sheet of black and yellow stripes on a dark ground."""
    image, draw, x, y = _ground(seed, (40, 45, 60))
    for row in range(6):
        draw.rectangle((x, y + 10 * row, x + 60, y + 10 * row + 9), fill=(245, 210, 0) if row % 2 else (10, 10, 10))
    return image


def grass(seed: int) -> Image.Image:
    """Green blades on green."""
    image, draw, _, _ = _ground(seed, (30, 90, 30))
    rng = random.Random(seed)
    for _ in range(300):
        x, y = rng.randrange(128), rng.randrange(128)
        draw.line((x, y, x + rng.randrange(-4, 5), y - 18), fill=(60, 120 + rng.randrange(100), 40), width=2)
    return image


def noise(seed: int) -> Image.Image:
    """Independent bytes."""
    return Image.frombytes("RGB", (128, 128), random.Random(seed).randbytes(3 * 128 * 128))


def _ground(seed: int, colour: tuple[int, int, int]) -> tuple[Image.Image, ImageDraw.ImageDraw, int, int]:
    rng = random.Random(seed)
    image = Image.new("RGB", (128, 128), tuple(c + rng.randrange(-15, 10) for c in colour))
    return image, ImageDraw.Draw(image), 15 + rng.randrange(38), 15 + rng.randrange(38)
