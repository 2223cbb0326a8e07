"""Twelve backgrounds drawn by code, each with random variations.

Every function takes a random generator and a side `n` in pixels and returns float32 RGB in [0, 1] of shape (n, n, 3).
Lengths are fractions of the side, so that a background looks the same at every size.
"""

from collections.abc import Callable

import numpy as np
from PIL import Image

Array = np.ndarray
Painter = Callable[[np.random.Generator, int], Array]


def smooth_noise(rng: np.random.Generator, n: int, rows: int, columns: int) -> Array:
    """Noise in [-1, 1] of shape (n, n, 1) that varies over about n/rows by n/columns pixels."""
    coarse = Image.fromarray(rng.uniform(-1, 1, (rows, columns)).astype(np.float32), mode=None)
    return np.asarray(coarse.resize((n, n), Image.Resampling.BICUBIC))[..., None]


def _grid(n: int) -> tuple[Array, Array]:
    """Pixel centres as (y, x) in [0, 1], shapes (n, 1) and (1, n)."""
    axis = (np.arange(n, dtype=np.float32) + 0.5) / n
    return axis[:, None], axis[None, :]


def _colour(rng: np.random.Generator, rgb: tuple[int, int, int], spread: float = 0.04) -> Array:
    """A colour near `rgb` (0..255) as float32 (3,)."""
    return np.clip(np.array(rgb, np.float32) / 255 + rng.uniform(-spread, spread, 3).astype(np.float32), 0, 1)


def _vertical(n: int, top: Array, bottom: Array) -> Array:
    """A vertical gradient, shape (n, n, 3)."""
    y, _ = _grid(n)
    column = top + (bottom - top) * y[..., None]
    return np.broadcast_to(column, (n, n, 3)).copy()


def _over(picture: Array, mask: Array, colour: Array) -> Array:
    """`colour` painted over `picture` where `mask` (n, n) in [0, 1] is set."""
    return picture + (colour - picture) * mask[..., None]


def _below(n: int, height: Array | float) -> Array:
    """Antialiased mask (n, n) of everything below `height` (a number, or shape (1, n))."""
    y, _ = _grid(n)
    return np.broadcast_to(np.clip((y - height) * n + 0.5, 0, 1), (n, n)).astype(np.float32)


def _dots(rng: np.random.Generator, n: int, count: int, low: float, high: float, bottom: float = 1.0) -> Array:
    """Mask (n, n) of `count` soft round dots with radii in [low, high], above `bottom`."""
    mask = np.zeros((n, n), np.float32)
    for _ in range(count):
        radius = rng.uniform(low, high) * n
        cy, cx = rng.uniform(0, bottom) * n, rng.uniform(0, 1) * n
        y0, y1 = max(0, int(cy - radius - 1)), min(n, int(cy + radius + 2))
        x0, x1 = max(0, int(cx - radius - 1)), min(n, int(cx + radius + 2))
        if y0 < y1 and x0 < x1:
            yy, xx = np.ogrid[y0:y1, x0:x1]
            distance = np.hypot(yy + 0.5 - cy, xx + 0.5 - cx)
            mask[y0:y1, x0:x1] = np.maximum(mask[y0:y1, x0:x1], np.clip(radius - distance + 0.5, 0, 1))
    return mask


def _hills(rng: np.random.Generator, level: float, amplitude: float) -> Callable[[int], Array]:
    """A random hilly outline; the result maps a side to heights of shape (1, n)."""
    phase, frequency = rng.uniform(0, 6.28), rng.uniform(2, 6)
    return lambda n: level + amplitude * np.sin(_grid(n)[1] * frequency + phase)


def beach(rng: np.random.Generator, n: int) -> Array:
    """Sky, a band of turquoise sea, sand."""
    picture = _vertical(n, _colour(rng, (120, 195, 245)), _colour(rng, (215, 240, 252)))
    horizon = rng.uniform(0.28, 0.42)
    shore = horizon + rng.uniform(0.12, 0.2)
    picture = _over(picture, _below(n, horizon), _colour(rng, (40, 165, 195)))
    outline = _hills(rng, shore, 0.015)(n)
    picture = _over(picture, _below(n, outline - 0.02), np.array([0.93, 0.98, 0.98], np.float32))
    sand = _colour(rng, (236, 208, 150)) + 0.04 * smooth_noise(rng, n, 24, 12)
    return _over(picture, _below(n, outline), sand)


def meadow(rng: np.random.Generator, n: int) -> Array:
    """Blue sky, green hills with a few flowers."""
    picture = _vertical(n, _colour(rng, (105, 180, 240)), _colour(rng, (205, 232, 250)))
    horizon = rng.uniform(0.32, 0.48)
    far, near = _hills(rng, horizon, 0.04), _hills(rng, horizon + 0.08, 0.04)
    picture = _over(picture, _below(n, far(n)), _colour(rng, (125, 190, 80)))
    grass = _colour(rng, (88, 168, 55)) + 0.05 * smooth_noise(rng, n, 10, 32)
    ground = _below(n, near(n))
    picture = _over(picture, ground, grass)
    flowers = _dots(rng, n, int(rng.integers(3, 9)), 0.008, 0.016) * (ground > 0.99)
    return _over(picture, flowers, np.array([0.99, 0.95, 0.6], np.float32))


def snow(rng: np.random.Generator, n: int) -> Array:
    """Grey-blue sky, white ground, flakes."""
    picture = _vertical(n, _colour(rng, (150, 175, 205)), _colour(rng, (205, 218, 232)))
    ground = _hills(rng, rng.uniform(0.42, 0.58), 0.04)(n)
    white = np.array([0.95, 0.97, 1.0], np.float32) + 0.025 * smooth_noise(rng, n, 8, 8)
    picture = _over(picture, _below(n, ground), white)
    return _over(picture, _dots(rng, n, int(rng.integers(14, 28)), 0.006, 0.014), np.ones(3, np.float32))


def night(rng: np.random.Generator, n: int) -> Array:
    """Dark blue sky with stars and a moon, dark ground."""
    picture = _vertical(n, _colour(rng, (12, 16, 48), 0.02), _colour(rng, (45, 50, 105), 0.03))
    picture = _over(
        picture, _dots(rng, n, int(rng.integers(16, 30)), 0.005, 0.010, 0.7), np.array([1, 1, 0.9], np.float32)
    )
    y, x = _grid(n)
    cy, cx, radius = rng.uniform(0.1, 0.25), rng.uniform(0.1, 0.9), rng.uniform(0.06, 0.09)
    moon = np.clip((radius - np.hypot(y - cy, x - cx)) * n + 0.5, 0, 1)
    picture = _over(picture, moon, np.array([0.98, 0.95, 0.8], np.float32))
    return _over(picture, _below(n, _hills(rng, rng.uniform(0.68, 0.8), 0.03)(n)), _colour(rng, (18, 24, 32), 0.02))


def bricks(rng: np.random.Generator, n: int) -> Array:
    """A wall of red bricks with light mortar."""
    rows = int(rng.integers(6, 9))
    y, x = _grid(n)
    v = y * rows + rng.uniform(0, 1)
    row = np.floor(v).astype(int)
    u = x * rows / 2.2 + 0.5 * (row % 2) + rng.uniform(0, 1)
    column = np.floor(u).astype(int)
    shade = rng.uniform(-0.06, 0.06, (16, 16)).astype(np.float32)[row % 16, column % 16][..., None]
    wall = _colour(rng, (172, 82, 62)) + shade + 0.02 * smooth_noise(rng, n, 24, 24)
    fv, fu = v - row, (u - column) * 2.2
    edge = np.minimum(np.minimum(fv, 1 - fv), np.minimum(fu, 2.2 - fu))
    mortar = np.clip((0.07 - edge) / rows * n + 0.5, 0, 1)
    return _over(wall, mortar, _colour(rng, (208, 196, 182)))


def wood(rng: np.random.Generator, n: int) -> Array:
    """The boards of a wooden table."""
    boards = int(rng.integers(4, 7))
    y, _ = _grid(n)
    v = y * boards + rng.uniform(0, 1)
    row = np.floor(v).astype(int)
    shade = rng.uniform(-0.05, 0.05, 16).astype(np.float32)[row % 16][..., None]
    picture = _colour(rng, (176, 122, 70)) + shade + 0.05 * smooth_noise(rng, n, 44, 4)
    gap = np.clip((0.03 - np.minimum(v - row, 1 - v + row)) / boards * n + 0.5, 0, 1)
    return _over(picture, np.broadcast_to(gap, (n, n)), _colour(rng, (95, 60, 32)))


def desert(rng: np.random.Generator, n: int) -> Array:
    """Pale yellow sky over orange dunes."""
    picture = _vertical(n, _colour(rng, (250, 215, 150)), _colour(rng, (253, 238, 205)))
    horizon = rng.uniform(0.35, 0.5)
    picture = _over(picture, _below(n, _hills(rng, horizon, 0.05)(n)), _colour(rng, (222, 150, 78)))
    near = _colour(rng, (205, 122, 52)) + 0.03 * smooth_noise(rng, n, 20, 5)
    return _over(picture, _below(n, _hills(rng, horizon + 0.14, 0.06)(n)), near)


def forest(rng: np.random.Generator, n: int) -> Array:
    """Dark green woods with trunks, mossy ground."""
    picture = _vertical(n, _colour(rng, (28, 74, 46)), _colour(rng, (70, 122, 72)))
    picture = picture + 0.06 * smooth_noise(rng, n, 12, 12)
    _, x = _grid(n)
    ground = rng.uniform(0.66, 0.78)
    for _ in range(int(rng.integers(4, 7))):
        centre, width = rng.uniform(0, 1), rng.uniform(0.02, 0.045)
        trunk = np.clip((width - np.abs(x - centre)) * n + 0.5, 0, 1) * (1 - _below(n, ground))
        picture = _over(picture, trunk, _colour(rng, (72, 50, 34)))
    return _over(picture, _below(n, ground), _colour(rng, (58, 92, 40)) + 0.04 * smooth_noise(rng, n, 10, 24))


def sea(rng: np.random.Generator, n: int) -> Array:
    """Deep blue water with light waves."""
    picture = _vertical(n, _colour(rng, (36, 108, 190)), _colour(rng, (18, 70, 150)))
    y, x = _grid(n)
    for _ in range(int(rng.integers(6, 10))):
        level, phase = rng.uniform(0, 1), rng.uniform(0, 6.28)
        line = level + 0.012 * np.sin(x * rng.uniform(14, 26) + phase)
        wave = np.clip((0.010 - np.abs(y - line)) * n + 0.5, 0, 1)
        start, length = rng.uniform(-0.3, 0.8), rng.uniform(0.3, 0.7)
        picture = _over(picture, wave * ((x > start) & (x < start + length)) * 0.6, _colour(rng, (140, 195, 240)))
    return picture


def checkered(rng: np.random.Generator, n: int) -> Array:
    """A floor of black and white tiles below a light grey wall."""
    y, x = _grid(n)
    horizon = rng.uniform(0.22, 0.36)
    depth = 0.35 / np.maximum(y - horizon, 0.02)
    tiles = rng.uniform(1.8, 2.4)
    u = (x - 0.5) * depth * tiles + rng.uniform(0, 2)
    v = depth * tiles + rng.uniform(0, 2)
    contrast = np.clip((y - horizon) / 0.12, 0, 1)
    floor = (((np.floor(u) + np.floor(v)) % 2 - 0.5) * contrast * 0.78 + 0.51).astype(np.float32)[..., None]
    wall = np.broadcast_to(_colour(rng, (206, 206, 212)), (n, n, 3))
    return _over(wall, _below(n, horizon), floor)


def pink(rng: np.random.Generator, n: int) -> Array:
    """Plain pink paper, a little darker towards the edges."""
    y, x = _grid(n)
    distance = np.hypot(y - rng.uniform(0.3, 0.7), x - rng.uniform(0.3, 0.7))[..., None]
    return _colour(rng, (250, 168, 196), 0.03) - 0.12 * distance.astype(np.float32)


def sunset(rng: np.random.Generator, n: int) -> Array:
    """Violet to orange sky with a low sun, dark ground."""
    picture = _vertical(n, _colour(rng, (92, 50, 130)), _colour(rng, (255, 150, 60)))
    y, x = _grid(n)
    cy, cx, radius = rng.uniform(0.4, 0.55), rng.uniform(0.1, 0.9), rng.uniform(0.08, 0.12)
    distance = np.hypot(y - cy, x - cx)
    picture = _over(picture, np.exp(-((distance / 0.25) ** 2)) * 0.5, np.array([1, 0.75, 0.4], np.float32))
    picture = _over(picture, np.clip((radius - distance) * n + 0.5, 0, 1), np.array([1, 0.93, 0.62], np.float32))
    return _over(picture, _below(n, _hills(rng, rng.uniform(0.66, 0.78), 0.02)(n)), _colour(rng, (60, 34, 52), 0.03))


PAINTERS: dict[str, Painter] = {
    "beach": beach, "meadow": meadow, "snow": snow, "night": night, "bricks": bricks, "wood": wood,
    "desert": desert, "forest": forest, "sea": sea, "checkered": checkered, "pink": pink, "sunset": sunset,
}  # fmt: skip
