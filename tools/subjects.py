"""Makes the pictures of the three held-out subjects, which the built-in model has never seen.

    python -m tools.subjects --build build

Each subject has 5 pictures to learn from and 5 kept back for measuring; poses are frames of an animated sprite, and no
background is in both.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from tools.captions import BACKGROUNDS
from tools.pictures import compose, square

SIDE = 256
"""Pixels of a subject's picture."""


@dataclass(frozen=True)
class Subject:
    """A held-out subject: its sprite (still and animated), the word for its kind, and its pictures' backgrounds."""

    name: str
    sprite: str
    class_word: str
    train: tuple[str, ...]
    heldout: tuple[str, ...]
    previews: tuple[str, ...]


SUBJECTS = (
    Subject(
        "parrot", "1f99c", "animal",
        train=("meadow", "wood", "snow", "bricks", "desert"),
        heldout=("beach", "forest", "pink", "night", "checkered"),
        previews=("beach", "forest", "pink", "checkered", "sea"),
    ),
    Subject(
        "dinosaur", "1f996", "animal",
        train=("beach", "checkered", "pink", "sunset", "wood"),
        heldout=("snow", "desert", "sea", "bricks", "night"),
        previews=("snow", "desert", "bricks", "sea", "night"),
    ),
    Subject(
        "unicorn", "1f984", "animal",
        train=("forest", "sea", "wood", "snow", "checkered"),
        heldout=("meadow", "beach", "desert", "bricks", "sunset"),
        previews=("meadow", "beach", "bricks", "desert", "night"),
    ),
)  # fmt: skip
TRAIN_FRAMES, HELDOUT_FRAMES = (0, 12, 25, 41, 56), (6, 18, 33, 48, 64)
HELD_OUT_SPRITES = tuple(subject.sprite for subject in SUBJECTS)


def poses(animation: Path, frames: tuple[int, ...]) -> list[Image.Image]:
    """The given frames of an animated sprite as square RGBA pictures."""
    found = []
    with Image.open(animation) as moving:
        for frame in frames:
            moving.seek(frame)
            found.append(square(moving.convert("RGBA")))
    return found


def write_subject(subject: Subject, animations: Path, out: Path, seed: int) -> None:
    """Writes `train/`, `heldout/` and `subject.json` of one subject."""
    rng = np.random.default_rng(seed)
    places: dict[str, str] = {}
    for part, backgrounds, frames in (
        ("train", subject.train, TRAIN_FRAMES),
        ("heldout", subject.heldout, HELDOUT_FRAMES),
    ):
        (out / part).mkdir(parents=True, exist_ok=True)
        sprites = poses(animations / f"{subject.sprite}.webp", frames)
        for number, (background, sprite) in enumerate(zip(backgrounds, sprites, strict=True), start=1):
            name = f"{part}/{number:02d}.png"
            picture = Image.fromarray(compose(rng, sprite, background, SIDE, zoom_share=0))
            picture.save(out / name, optimize=True)
            places[name] = BACKGROUNDS[background]
    prompt = f"a photo of sks {subject.class_word}"
    card = {
        "name": subject.name,
        "class_word": subject.class_word,
        "instance_prompt": prompt,
        "backgrounds": places,
        "preview_prompts": [f"{prompt} {BACKGROUNDS[background]}" for background in subject.previews],
    }
    (out / "subject.json").write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Makes all subjects."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=Path("build"))
    parser.add_argument("--out", type=Path, default=Path("src/blockskip/builtin/subjects"))
    arguments = parser.parse_args()
    animations = arguments.build / "node_modules/@lobehub/fluent-emoji-anim-3/assets"
    for number, subject in enumerate(SUBJECTS):
        write_subject(subject, animations, arguments.out / subject.name, seed=100 + number)
        print(arguments.out / subject.name)


if __name__ == "__main__":
    main()
