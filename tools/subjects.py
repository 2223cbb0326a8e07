"""Makes the pictures of the 24 unseen subjects, of which the built-in models have seen no picture and no name.

    python -m tools.subjects --build build

Each subject has 5 pictures to learn from and 5 kept back for measuring, no view and no background in both. Four of
each five have the shaded look: those frames of the animated sprite that differ most, or the still where it has one
frame only. The fifth is the "modern" rendering. Each is seen from another side: mirrored, turned, foreshortened.
"""

import argparse
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from tools.backgrounds import PAINTERS
from tools.captions import BACKGROUNDS, article
from tools.held_out import SUBJECT_SPRITES
from tools.pictures import UPRIGHT, load_sprite, shadow, square

SIDE = 256
"""Pixels of a subject's picture."""
IMAGES_PER_PROMPT, SEEDS = 4, (0, 1, 2)
"""Pictures drawn for an evaluation prompt after a training, and the seeds of the trainings."""
DEVELOPMENT = 12
"""So many subjects, the first ones, are for development; the others are the final test."""
NOTE = (
    "The subjects of the test set are for published tables only: they are looked at when a table is made, and nothing "
    "is chosen, tuned or shown in passing on them."
)


@dataclass(frozen=True)
class Subject:
    """One subject: the word for its kind, and the backgrounds of its training and its kept-back pictures, in order.

    The two backgrounds that are in neither are those on which the subject would hardly be seen.
    """

    name: str
    class_word: str
    train: str
    heldout: str


SUBJECTS = (
    Subject("dinosaur", "animal", "beach checkered pink sunset wood", "snow desert sea bricks night"),
    Subject("parrot", "animal", "wood meadow night snow forest", "pink sea desert checkered beach"),
    Subject("unicorn", "animal", "forest bricks snow beach wood", "night desert sunset checkered meadow"),
    Subject("owl", "animal", "bricks pink checkered snow sunset", "meadow sea beach desert night"),
    Subject("crab", "animal", "beach sea desert snow sunset", "checkered night wood meadow forest"),
    Subject("hedgehog", "animal", "sunset bricks meadow snow checkered", "beach forest pink night sea"),
    Subject("camera", "thing", "beach sea sunset meadow snow", "wood bricks pink forest desert"),
    Subject("scooter", "vehicle", "snow night wood meadow desert", "pink beach forest sea checkered"),
    Subject("fire engine", "vehicle", "checkered forest meadow snow desert", "pink wood beach night sea"),
    Subject("pretzel", "food", "sunset pink forest night snow", "meadow sea bricks beach checkered"),
    Subject("nesting doll", "toy", "night sea beach snow meadow", "wood desert forest sunset checkered"),
    Subject("hibiscus", "plant", "bricks sea checkered wood forest", "beach night desert snow sunset"),
    Subject("dragon", "animal", "sea beach snow night desert", "bricks sunset pink wood checkered"),
    Subject("flamingo", "animal", "sunset wood desert sea forest", "checkered beach snow night meadow"),
    Subject("giraffe", "animal", "beach night forest meadow bricks", "snow checkered pink sunset sea"),
    Subject("hamster", "animal", "meadow wood checkered night pink", "forest bricks beach sea snow"),
    Subject("duck", "animal", "meadow desert pink sunset beach", "checkered sea bricks forest wood"),
    Subject("snail", "animal", "sea checkered sunset bricks snow", "forest night pink meadow beach"),
    Subject("teapot", "thing", "wood forest night sea checkered", "beach meadow desert sunset snow"),
    Subject("crown", "thing", "meadow beach checkered sea forest", "bricks pink night snow sunset"),
    Subject("ship", "vehicle", "desert night forest beach sunset", "meadow checkered bricks wood pink"),
    Subject("taco", "food", "checkered meadow beach bricks pink", "night wood snow sea forest"),
    Subject("kite", "toy", "beach forest pink sea desert", "snow checkered bricks sunset wood"),
    Subject("rose", "plant", "desert sea pink wood night", "snow beach checkered meadow sunset"),
)


@dataclass(frozen=True)
class View:
    """The side from which a subject is seen: mirrored or not, then turned about the three axes, in degrees."""

    flip: bool
    yaw: float
    pitch: float
    roll: float


VIEWS = {
    "train": (View(False, 0, 0, 0), View(True, 34, 0, 9), View(False, -38, 8, -10), View(True, 8, 22, 16),
              View(False, 24, 0, -7)),
    "heldout": (View(True, -18, 0, 3), View(False, 40, -8, 13), View(True, 26, -22, -14), View(False, -12, 18, -19),
                View(True, -32, 0, 7)),
}  # fmt: skip
DISTANCE = 4.0
"""Of the eye from the middle of the sprite, in halves of its side."""


def seen(sprite: Image.Image, view: View) -> Image.Image:
    """The square RGBA sprite as it is seen from a side, square again: rotated about y, x and z, then projected."""
    yaw, pitch, roll = np.radians([view.yaw, view.pitch, view.roll])
    about_y = np.array([[np.cos(yaw), 0, np.sin(yaw)], [0, 1, 0], [-np.sin(yaw), 0, np.cos(yaw)]])
    about_x = np.array([[1, 0, 0], [0, np.cos(pitch), -np.sin(pitch)], [0, np.sin(pitch), np.cos(pitch)]])
    about_z = np.array([[np.cos(roll), -np.sin(roll), 0], [np.sin(roll), np.cos(roll), 0], [0, 0, 1]])
    rotation = about_z @ about_x @ about_y
    # Of a point (x, y, 0) of the sprite: what is seen at (u, v) = (X, Y) * d / (d + Z), a homography.
    project = np.stack([rotation[0, :2], rotation[1, :2], rotation[2, :2] / DISTANCE])
    project = np.concatenate([project, [[0], [0], [1]]], axis=1)
    n, m = sprite.width, 2 * sprite.width  # the view gets twice the side, so that nothing leaves it
    to_unit = np.array([[4 / m, 0, -2], [0, 4 / m, -2], [0, 0, 1]])
    to_sprite = np.array([[n / 2, 0, n / 2], [0, n / 2, n / 2], [0, 0, 1]])
    inverse = to_sprite @ np.linalg.inv(project) @ to_unit
    if view.flip:
        sprite = sprite.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    coefficients = tuple(round(float(value), 9) for value in (inverse / inverse[2, 2]).ravel()[:8])
    return square(sprite.transform((m, m), Image.Transform.PERSPECTIVE, coefficients, Image.Resampling.BICUBIC))


def difference(one: Image.Image, other: Image.Image) -> float:
    """Root mean square of the difference of two sprites at 48 px, colours and opacity in [0, 1]."""
    pixels = [np.asarray(sprite.convert("RGBa").resize((48, 48)), np.float32) / 255 for sprite in (one, other)]
    return float(np.sqrt(((pixels[0] - pixels[1]) ** 2).mean()))


def different_frames(animation: Path, count: int) -> list[int]:
    """Numbers of `count` frames: the first one, then always the one least like all before; zeros for a still."""
    with Image.open(animation) as moving:
        frames = []
        for number in range(moving.n_frames):
            moving.seek(number)
            frames.append(square(moving.convert("RGBA")))
    if len(frames) < count:
        return [0] * count
    chosen, nearest = [0], np.full(len(frames), np.inf)
    while len(chosen) < count:
        nearest = np.minimum(nearest, [difference(frame, frames[chosen[-1]]) for frame in frames])
        chosen.append(int(nearest.argmax()))
    return chosen


def frame(animation: Path, number: int) -> Image.Image:
    """One frame of an animated sprite as a square RGBA picture."""
    with Image.open(animation) as moving:
        moving.seek(number)
        return square(moving.convert("RGBA"))


def sprites(assets: Path, code: str) -> dict[str, list[tuple[str, Image.Image]]]:
    """What is drawn in `train` and `heldout`: five sprites each, seen from their sides, with their renderings' names.

    Args:
        assets: the folder `node_modules/@lobehub`.
        code: the file stem of the sprite.
    """
    animation = next(assets.glob(f"fluent-emoji-anim-*/assets/{code}.webp"))
    numbers = different_frames(animation, 8)
    modern = ("modern", load_sprite(assets / f"fluent-emoji-modern/assets/{code}.svg"))
    found = {}
    for part, places in (("train", (0, 3, 4, 7)), ("heldout", (1, 2, 5, 6))):
        shaded = [(f"3D, frame {numbers[place]}", frame(animation, numbers[place])) for place in places]
        found[part] = [
            (name, seen(sprite, view)) for (name, sprite), view in zip([*shaded, modern], VIEWS[part], strict=True)
        ]
    return found


def picture(rng: np.random.Generator, sprite: Image.Image, background: str) -> Image.Image:
    """The whole sprite at a random place and size on a background, drawn at twice the side and scaled down."""
    n = 2 * SIDE
    canvas = Image.fromarray((np.clip(PAINTERS[background](rng, n), 0, 1) * 255).astype(np.uint8))
    size = int(n * rng.uniform(0.58, 0.84))
    left = int((n - size) * rng.uniform(0.1, 0.9))
    top = int((n - size) * rng.uniform(0.45 if background in UPRIGHT else 0.1, 0.9))
    sprite = sprite.resize((size, size), Image.Resampling.BICUBIC)
    shadow(canvas, sprite, left, top, size)
    canvas.paste(sprite, (left, top), sprite)
    return canvas.resize((SIDE, SIDE), Image.Resampling.BOX)


def prompts(subject: Subject) -> dict[str, list[str]]:
    """The evaluation prompts in three sorts, all on backgrounds that no training picture has."""
    new = [BACKGROUNDS[background] for background in subject.heldout.split()]
    words = f"sks {subject.class_word}"
    return {
        "background": [f"a photo of {words} {background}" for background in new[:4]],
        "size": [f"a photo of {article(f'{size} {words}')} {new[at]}" for size, at in (("small", 4), ("large", 0))],
        "position": [f"a photo of {words} on the {side} {new[at]}" for side, at in (("left", 1), ("right", 2))],
    }


def write_subject(subject: Subject, assets: Path, out: Path, seed: int) -> list[Image.Image]:
    """Writes `train/`, `heldout/` and `subject.json` of one subject in place of what was there; returns its sprites."""
    rng = np.random.default_rng(seed)
    shutil.rmtree(out, ignore_errors=True)
    places: dict[str, str] = {}
    renderings: dict[str, str] = {}
    drawn = sprites(assets, SUBJECT_SPRITES[subject.name])
    for part, backgrounds in (("train", subject.train.split()), ("heldout", subject.heldout.split())):
        (out / part).mkdir(parents=True)
        for number, (background, (rendering, sprite)) in enumerate(zip(backgrounds, drawn[part], strict=True), start=1):
            name = f"{part}/{number:02d}.webp"
            picture(rng, sprite, background).save(out / name, quality=95, method=6)
            places[name], renderings[name] = BACKGROUNDS[background], rendering
    prompt = f"a photo of sks {subject.class_word}"
    card = {
        "name": subject.name,
        "set": "development" if SUBJECTS.index(subject) < DEVELOPMENT else "test",
        "class_word": subject.class_word,
        "instance_prompt": prompt,
        "backgrounds": places,
        "renderings": renderings,
        "preview_prompts": [f"{prompt} {BACKGROUNDS[background]}" for background in subject.heldout.split()],
        "evaluation": {"prompts": prompts(subject), "images_per_prompt": IMAGES_PER_PROMPT, "seeds": SEEDS},
    }
    (out / "subject.json").write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
    return [sprite for part in drawn.values() for _, sprite in part]


def main() -> None:
    """Makes all subjects and their index."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=Path("build"), help="work folder with the fetched packages")
    parser.add_argument("--out", type=Path, default=Path("src/blockskip/builtin/subjects"))
    arguments = parser.parse_args()
    names = [subject.name for subject in SUBJECTS]
    for number, subject in enumerate(SUBJECTS):
        folder = arguments.out / subject.name.replace(" ", "_")
        drawn = write_subject(subject, arguments.build / "node_modules/@lobehub", folder, seed=100 + number)
        nearest = min(difference(one, other) for at, one in enumerate(drawn) for other in drawn[:at])
        print(f"{folder}: the two sprites most alike differ by {nearest:.3f}")
    index = {"note": NOTE, "development": names[:DEVELOPMENT], "test": names[DEVELOPMENT:]}
    (arguments.out / "subjects.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
