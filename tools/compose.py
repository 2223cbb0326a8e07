"""Composes a pool of pictures: an array of uint8 RGB (count, side, side, 3) and a caption for each.

    python -m tools.compose --sprites objects --side 64 --count 48000 --seed 1 --out build/pictures/train64

`--sprites objects` draws the model's own objects with captions; `--sprites any` draws every sprite of the package but
the held-out subjects (for the VAE, which should know shapes in general).
"""

import argparse
import json
from pathlib import Path

import numpy as np

from tools.captions import BACKGROUNDS, OBJECTS, caption
from tools.pictures import compose, load_sprite
from tools.subjects import HELD_OUT_SPRITES

SKIN_TONES = ("1f3fb", "1f3fc", "1f3fd", "1f3fe", "1f3ff")


def general_sprites(folder: Path) -> list[Path]:
    """Every sprite file except skin-tone variants, flags and the held-out subjects."""
    flags = tuple(f"1f1{digit:x}" for digit in range(0xE, 0x10))
    return [
        path
        for path in sorted(folder.glob("*.webp"))
        if not any(tone in path.stem for tone in SKIN_TONES)
        and not path.stem.startswith(flags)
        and path.stem not in HELD_OUT_SPRITES
    ]


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
    assets = arguments.build / "node_modules/@lobehub/fluent-emoji-3d/assets"
    if arguments.sprites == "objects":
        sprites = [load_sprite(assets / f"{thing.sprite}.webp") for thing in OBJECTS]
    else:
        sprites = [load_sprite(path) for path in general_sprites(assets)]
    backgrounds = list(BACKGROUNDS)

    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    pictures = np.empty((arguments.count, arguments.side, arguments.side, 3), np.uint8)
    captions = []
    for index in range(arguments.count):
        number, background = int(rng.integers(len(sprites))), backgrounds[int(rng.integers(len(backgrounds)))]
        pictures[index] = compose(rng, sprites[number], background, arguments.side)
        captions.append(caption(rng, OBJECTS[number], background) if arguments.sprites == "objects" else "")
    np.save(arguments.out.with_suffix(".npy"), pictures)
    arguments.out.with_suffix(".json").write_text(json.dumps(captions))
    print(f"{arguments.count} pictures of {arguments.side} px of {len(sprites)} sprites in {arguments.out}.npy")


if __name__ == "__main__":
    main()
