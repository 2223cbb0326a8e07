"""The 24 unseen subjects: what is shipped of each, that no model has seen them, and how their pictures are made."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageChops

from blockskip import builtin
from blockskip.data.pictures import read_pictures
from blockskip.data.pixels import open_picture
from tools import subjects
from tools.captions import BACKGROUNDS, OBJECTS, STYLES, caption
from tools.compose import general_sprites
from tools.held_out import HELD_OUT_SPRITES, SUBJECT_SPRITES

SETS = {which: builtin.subjects(which) for which in ("development", "test")}
NAMES = [name for names in SETS.values() for name in names]
PARTS = ("train", "heldout")
SORTS = {"background": 4, "size": 2, "position": 2}
SIZES, POSITIONS = ("small", "large"), ("on the left", "on the right")
#: Other words for the subjects, and words for what looks like them.
SYNONYMS = {
    "dinosaur": "tyrannosaurus t-rex sauropod brontosaurus raptor", "parrot": "macaw budgie cockatoo parakeet",
    "unicorn": "horse pony", "owl": "owlet", "crab": "lobster", "hedgehog": "porcupine", "camera": "camcorder",
    "scooter": "moped vespa motorcycle motorbike", "fire engine": "firetruck truck lorry", "pretzel": "bretzel bagel",
    "nesting doll": "matryoshka figurine", "hibiscus": "blossom flower", "dragon": "wyvern drake",
    "flamingo": "heron stork", "giraffe": "okapi", "hamster": "mouse gerbil rat", "duck": "mallard goose duckling",
    "snail": "slug", "teapot": "kettle pot", "crown": "tiara diadem", "ship": "ferry liner steamer boat",
    "taco": "burrito tortilla", "kite": "glider", "rose": "rosebud",
}  # fmt: skip


def card(name: str) -> dict:
    return json.loads((builtin.subject_path(name) / "subject.json").read_text(encoding="utf-8"))


def files(name: str) -> list[Path]:
    return [path for part in PARTS for path in sorted((builtin.subject_path(name) / part).iterdir())]


def all_prompts(about: dict) -> list[str]:
    return [prompt for prompts in about["evaluation"]["prompts"].values() for prompt in prompts]


def test_two_sets_of_twelve_without_overlap():
    assert [len(names) for names in SETS.values()] == [12, 12]
    assert len({name.lower() for name in NAMES}) == 24
    assert list(SUBJECT_SPRITES) == NAMES
    assert len(set(SUBJECT_SPRITES.values())) == 24


def test_nothing_lies_about_that_the_index_does_not_name():
    folders = {path.name for path in builtin.subject_path(NAMES[0]).parent.iterdir()}
    assert folders == {name.replace(" ", "_") for name in NAMES} | {"subjects.json"}
    assert sum(path.stat().st_size for name in NAMES for path in files(name)) < 4 * 2**20


@pytest.mark.parametrize("name", NAMES)
def test_a_subject_has_pictures_that_open_and_a_card_that_describes_them(name):
    folder, about = builtin.subject_path(name), card(name)
    assert about["name"] == name and name in SETS[about["set"]]
    for part in PARTS:
        pictures = read_pictures(folder / part, about["instance_prompt"], resolution=64, full_resolution=128)
        assert 4 <= len(pictures) <= 6
        assert {picture.size for picture in pictures} == {(256, 256)}
    names = [path.relative_to(folder).as_posix() for path in files(name)]
    assert list(about["backgrounds"]) == list(about["renderings"]) == names
    for part in PARTS:
        # the shaded look, and one picture of the other rendering on either side
        kinds = [kind.split(",")[0] for at, kind in about["renderings"].items() if at.startswith(part)]
        assert kinds == ["3D"] * 4 + ["modern"]


@pytest.mark.parametrize("name", NAMES)
def test_no_picture_is_like_another_of_its_subject(name):
    paths = files(name)
    assert len({path.read_bytes() for path in paths}) == len(paths)
    pixels = [np.asarray(open_picture(path).resize((64, 64)), np.float32) / 255 for path in paths]
    distances = [float(np.sqrt(((a - b) ** 2).mean())) for a, b in itertools.combinations(pixels, 2)]
    assert min(distances) > 0.12  # the nearest two of all subjects: 0.187


@pytest.mark.parametrize("name", NAMES)
def test_no_background_is_both_learned_from_and_kept_back(name):
    backgrounds = card(name)["backgrounds"]
    train, heldout = ([where for at, where in backgrounds.items() if at.startswith(part)] for part in PARTS)
    assert len(set(train)) == len(train) and len(set(heldout)) == len(heldout)
    assert not set(train) & set(heldout)
    assert set(backgrounds.values()) <= set(BACKGROUNDS.values())


@pytest.mark.parametrize("name", NAMES)
def test_prompts_are_of_three_sorts_on_backgrounds_without_a_training_picture(name):
    about = card(name)
    words = f"sks {about['class_word']}"
    assert about["instance_prompt"] == f"a photo of {words}"
    evaluation = about["evaluation"]
    prompts = evaluation["prompts"]
    assert {sort: len(given) for sort, given in prompts.items()} == SORTS
    assert len(set(all_prompts(about))) >= 8
    assert evaluation["images_per_prompt"] == 4 and len(set(evaluation["seeds"])) == len(evaluation["seeds"]) >= 1
    trained = {where for at, where in about["backgrounds"].items() if at.startswith("train")}
    for prompt in all_prompts(about) + about["preview_prompts"]:
        (background,) = (phrase for phrase in BACKGROUNDS.values() if prompt.endswith(phrase))
        assert background not in trained, prompt
    starts = {sort: [prompt.rsplit(words)[0] for prompt in given] for sort, given in prompts.items()}
    assert starts["size"] == [f"a photo of a {size} " for size in SIZES]
    assert starts["background"] == ["a photo of "] * 4 and starts["position"] == ["a photo of "] * 2
    assert all(f"{words} {where} " in prompt for prompt, where in zip(prompts["position"], POSITIONS, strict=True))
    assert len(about["preview_prompts"]) == 5


def test_prompts_use_only_words_that_the_captions_know():
    rng = np.random.default_rng(0)
    known = set()
    for thing, background, style in itertools.product(OBJECTS, BACKGROUNDS, STYLES):
        size, position = SIZES[int(rng.integers(2))], POSITIONS[int(rng.integers(2))]
        text = caption(rng, thing, background, style, size, position)
        known |= set(text.split())
    phrases = {" ".join(BACKGROUNDS.values()), *(kind for thing in OBJECTS for kind in thing.kinds)}
    meant = {word for phrase in phrases for word in phrase.split()} | {"a", "photo", "of", *SIZES}
    meant |= {word for position in POSITIONS for word in position.split()}
    assert meant <= known, "the captions no longer say what the prompts ask for"
    for name in NAMES:
        about = card(name)
        assert about["class_word"] in {kind for thing in OBJECTS for kind in thing.kinds}
        for prompt in [*all_prompts(about), *about["preview_prompts"], about["instance_prompt"]]:
            assert set(prompt.split()) - {"sks"} <= meant, prompt


def test_no_object_of_the_models_is_a_subject_or_called_like_one():
    assert set(SYNONYMS) == set(NAMES)
    taken = {word for name in NAMES for word in [*name.split(), *SYNONYMS[name].split()]}
    for thing in OBJECTS:
        assert not set(thing.name.lower().split()) & taken, thing.name
        assert not thing.sprite.startswith(HELD_OUT_SPRITES), thing.name
    kinds = {kind for thing in OBJECTS for kind in thing.kinds}
    assert not kinds & taken


def test_pictures_in_general_leave_out_every_subject_and_its_relatives(tmp_path):
    wanted = {"1f34e.webp", "1f436.webp", "2602-fe0f.webp", "1f9d1-200d-1f680.webp"}
    unwanted = {f"{sprite}.webp" for sprite in HELD_OUT_SPRITES}
    unwanted |= {f"{sprite}-200d-2642-fe0f.webp" for sprite in SUBJECT_SPRITES.values()}  # a variant of the same thing
    unwanted |= {"1f44b-1f3fd.webp", "1f1e9-1f1ea.webp"}
    for file in wanted | unwanted:
        (tmp_path / file).touch()
    assert {path.name for path in general_sprites(tmp_path)} == wanted
    assert set(SUBJECT_SPRITES.values()) <= set(HELD_OUT_SPRITES)


def test_the_cards_are_those_that_the_script_writes():
    assert [subject.name for subject in subjects.SUBJECTS] == NAMES
    for subject in subjects.SUBJECTS:
        about = card(subject.name)
        given = [*subject.train.split(), *subject.heldout.split()]
        assert list(about["backgrounds"].values()) == [BACKGROUNDS[background] for background in given]
        assert about["class_word"] == subject.class_word
        assert about["evaluation"]["prompts"] == subjects.prompts(subject)


def sprite(side: int = 96) -> Image.Image:
    """An opaque sprite that fills its square and looks different from every side."""
    ramp = np.linspace(0, 255, side).astype(np.uint8)
    red, green = np.broadcast_to(ramp, (side, side)), np.broadcast_to(ramp[:, None] // 2, (side, side))
    return Image.fromarray(np.dstack([red, green, np.zeros_like(red), np.full_like(red, 255)]))


def test_a_view_turns_mirrors_and_foreshortens():
    whole = sprite()
    flip, half = Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.ROTATE_180
    for view, expected in (
        (subjects.View(False, 0, 0, 0), whole),
        (subjects.View(True, 0, 0, 0), whole.transpose(flip)),
        (subjects.View(False, 0, 0, 180), whole.transpose(half)),
    ):
        assert subjects.difference(subjects.seen(whole, view), expected) < 0.03
        assert subjects.difference(subjects.seen(whole, view), whole.transpose(Image.Transpose.ROTATE_90)) > 0.2
    for view, sides in ((subjects.View(False, 60, 0, 0), (0, 2)), (subjects.View(False, 0, 60, 0), (1, 3))):
        seen = subjects.seen(whole, view)
        box = seen.getchannel("A").point(lambda a: 255 if a > 8 else 0).getbbox()
        across = (box[sides[1]] - box[sides[0]]) / seen.width
        assert 0.4 < across < 0.65  # cos 60 degrees; the near edge is enlarged


def test_the_views_of_one_picture_are_all_different():
    whole = sprite()
    views = [subjects.seen(whole, view) for part in PARTS for view in subjects.VIEWS[part]]
    assert min(subjects.difference(a, b) for a, b in itertools.combinations(views, 2)) > 0.1


def write_animation(path: Path, shades: list[int]) -> Path:
    frames = [
        ImageChops.multiply(sprite(), Image.new("RGBA", (96, 96), (shade, shade, shade, 255))) for shade in shades
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    frames[0].save(path, save_all=True, append_images=frames[1:], lossless=True, duration=40)
    return path


def test_poses_are_the_frames_that_differ_most(tmp_path):
    shades = [250, 251, 252, 253, 20, 252, 130, 251, 250]
    assert subjects.different_frames(write_animation(tmp_path / "moving.webp", shades), 3) == [0, 4, 6]
    assert subjects.different_frames(write_animation(tmp_path / "still.webp", [250]), 3) == [0, 0, 0]


def test_the_same_command_gives_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(subjects, "SIDE", 48)
    monkeypatch.setattr(subjects, "load_sprite", lambda path: sprite().rotate(90))
    write_animation(tmp_path / f"fluent-emoji-anim-2/assets/{SUBJECT_SPRITES['owl']}.webp", [250, 20, 130])
    (owl,) = (subject for subject in subjects.SUBJECTS if subject.name == "owl")

    def made(folder: str, seed: int) -> list[bytes]:
        (tmp_path / folder / "train").mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "train" / "99.png").touch()  # of an earlier layout
        subjects.write_subject(owl, tmp_path, tmp_path / folder, seed)
        found = sorted(path for path in (tmp_path / folder).rglob("*") if path.is_file())
        assert len(found) == 11
        return [path.read_bytes() for path in found]

    first = made("one", 3)
    assert made("one", 3) == first
    assert made("two", 4) != first
