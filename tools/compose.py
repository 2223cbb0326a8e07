"""Composes a pool of pictures: an array of uint8 RGB (count, side, side, 3) and a caption for each.

    python -m tools.compose --sprites objects --side 64 --count 48000 --seed 1 --out build/pictures/train64

`--sprites objects` draws the model's own objects with captions; `--sprites any` draws every sprite of the packages but
the held-out subjects (for the VAE, which should know shapes in general). Seven of ten pictures are shaded, the others
flat.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from PIL import Image

from tools.captions import BACKGROUNDS, OBJECTS, STYLES, caption
from tools.held_out import HELD_OUT_SPRITES
from tools.pictures import compose_placed, load_sprite

SKIN_TONES = ("1f3fb", "1f3fc", "1f3fd", "1f3fe", "1f3ff")


SHARES = {"photo": 0.7, "flat": 0.3}
"""How often each style is drawn."""


def general_sprites(folder: Path) -> list[Path]:
    """Every sprite file except skin-tone variants, flags and the held-out subjects with their relatives."""
    flags = tuple(f"1f1{digit:x}" for digit in range(0xE, 0x10))
    return [
        path
        for path in sorted(folder.iterdir())
        if not any(tone in path.stem for tone in SKIN_TONES)
        and not path.stem.startswith(flags)
        and not path.stem.startswith(HELD_OUT_SPRITES)
    ]


def sprites_of(build: Path, style: str, which: str) -> list[Image.Image]:
    """The sprites of one style: the model's `objects` in their order, or `any`."""
    folder = build / "node_modules" / STYLES[style].package / "assets"
    if which == "objects":
        return [load_sprite(folder / f"{thing.sprite}{STYLES[style].suffix}") for thing in OBJECTS]
    return [load_sprite(path) for path in general_sprites(folder)]


def main() -> None:
    """Composes one pool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=Path("build"), help="work folder with the fetched packages")
    parser.add_argument("--sprites", choices=("objects", "any"), default="objects")
    parser.add_argument("--side", type=int, default=64, help="pixels")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="stem; .npy and .json are added")
    arguments = parser.parse_args()

    rng = np.random.default_rng(arguments.seed)
    sprites = {style: sprites_of(arguments.build, style, arguments.sprites) for style in STYLES}
    backgrounds = list(BACKGROUNDS)

    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    pictures = np.empty((arguments.count, arguments.side, arguments.side, 3), np.uint8)
    captions = []
    for index in range(arguments.count):
        style = str(rng.choice(list(SHARES), p=list(SHARES.values())))
        number, background = int(rng.integers(len(sprites[style]))), backgrounds[int(rng.integers(len(backgrounds)))]
        pictures[index], placed = compose_placed(rng, sprites[style][number], background, arguments.side)
        words = (background, style, placed.size_word, placed.position)
        captions.append(caption(rng, OBJECTS[number], *words) if arguments.sprites == "objects" else "")
    np.save(arguments.out.with_suffix(".npy"), pictures)
    arguments.out.with_suffix(".json").write_text(json.dumps(captions))
    count = sum(map(len, sprites.values()))
    print(f"{arguments.count} pictures of {arguments.side} px of {count} sprites in {arguments.out}.npy")


if __name__ == "__main__":
    main()
