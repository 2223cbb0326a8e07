"""The pixels of a sample belong to its picture, box and caption."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from blockskip.data.pictures import Picture, read_pictures
from blockskip.data.pixels import PictureCache, load_pixels
from blockskip.data.schedule import sample_pixels, sample_places
from blockskip.method.patches import cut_patch
from tests.data.gallery import FULL, RESOLUTION, STRIDE, config, inside, samples, schedule_of


@pytest.fixture
def pictures(tmp_path: Path) -> list[Picture]:
    """Gradients from left to right in a colour of their own, captioned with it; two are of the class."""
    for kind, colours in {"subject": [(1, 0, 0), (0, 1, 0), (0, 0, 1)], "class": [(1, 1, 0), (0, 1, 1)]}.items():
        (tmp_path / kind).mkdir()
        for number, colour in enumerate(colours):
            ramp = np.linspace(60, 250, 160)[None, :, None] * np.array(colour) * np.ones((140, 1, 1))
            Image.fromarray(ramp.astype(np.uint8)).save(tmp_path / kind / f"{number}.png")
            (tmp_path / kind / f"{number}.txt").write_text(str(colour))
    options: dict[str, Any] = {"resolution": RESOLUTION, "full_resolution": FULL}
    return read_pictures(tmp_path / "subject", None, **options) + read_pictures(
        tmp_path / "class", None, is_class=True, **options
    )


@pytest.mark.parametrize("shape", ["square", "picture"])
def test_pixels_caption_weight_and_flip_belong_together(pictures: list[Picture], shape: str) -> None:
    keys = {"train__batch_size": 2, "data__flip": True, "data__class_weight": 0.5, "patches__shape": shape}
    schedule = schedule_of(config(**keys, train__steps=10), pictures)
    for group in schedule.groups:
        pixels = sample_pixels(schedule, group)
        assert pixels.shape == (4, 3, group.size[1], group.size[0])
        assert pixels.dtype == torch.float32
        assert pixels.abs().max() <= 1
        for sample, patch in zip(group.samples, pixels, strict=True):
            lit = tuple(int(bright) for bright in patch.mean((1, 2)) > -0.9)
            assert str(lit) == sample.caption
            assert sample.weight == (0.5 if sum(lit) == 2 else 1)
            channel = patch[lit.index(1)]
            assert (channel[:, 0].mean() > channel[:, -1].mean()) == sample.flip


def test_a_flipped_patch_is_the_mirror_of_the_same_patch(pictures: list[Picture]) -> None:
    schedule = schedule_of(config(train__batch_size=3), pictures[:3])
    group = schedule.groups[0]
    flipped = dataclasses.replace(group, samples=tuple(dataclasses.replace(s, flip=True) for s in group.samples))
    plain = sample_pixels(schedule, group)
    assert torch.equal(sample_pixels(schedule, flipped), plain.flip(-1))
    assert not torch.equal(plain.flip(-1), plain)


@pytest.mark.parametrize("shape", ["square", "picture"])
def test_places_are_where_the_patches_lie(pictures: list[Picture], shape: str) -> None:
    """In tokens of the scaled picture: what the mirrored picture shows there is the patch."""
    keys = {"train__batch_size": 2, "data__flip": True, "patches__shape": shape, "train__steps": 10}
    schedule = schedule_of(config(**keys), pictures)
    flips = set()
    for group in schedule.groups:
        places = sample_places(schedule, group, STRIDE)
        assert places.shape == (4, 4)
        assert places.dtype == torch.float32
        for sample, place, patch in zip(group.samples, places, sample_pixels(schedule, group), strict=True):
            picture = schedule.pictures[sample.picture]
            whole = load_pixels(picture.path, picture.scaled)
            box = tuple(int(length) for length in (place * STRIDE).tolist())
            expected = cut_patch(whole.flip(-1) if sample.flip else whole, box, group.size)
            torch.testing.assert_close(patch, expected, rtol=0, atol=0.02)  # a mirrored filter rounds otherwise
            flips.add((sample.flip, box[0] == sample.box[0]))
    assert {(False, True), (True, False)} <= flips


def test_a_cache_changes_nothing(pictures: list[Picture]) -> None:
    schedule = schedule_of(config(train__batch_size=2, train__steps=5), pictures)
    for cache, group in itertools.product([PictureCache(), PictureCache(limit=100_000)], schedule.groups):
        assert torch.equal(sample_pixels(schedule, group, cache), sample_pixels(schedule, group))


def test_a_patch_of_the_training_size_is_the_picture_itself(pictures: list[Picture]) -> None:
    schedule = schedule_of(config(patches__direction="high-to-low", train__steps=200), pictures)
    group = next(g for g in schedule.groups if g.samples[0].box[2:] == g.size)
    sample = group.samples[0]
    left, top, width, height = sample.box
    picture = pictures[sample.picture]
    whole = load_pixels(picture.path, picture.scaled)
    assert torch.equal(sample_pixels(schedule, group)[0], whole[:, top : top + height, left : left + width])


@pytest.mark.parametrize("shape", ["square", "picture"])
@pytest.mark.parametrize("direction", ["low-to-high", "high-to-low", "random", "fixed"])
def test_tiny_and_very_long_pictures_are_trained_too(tmp_path: Path, shape: str, direction: str) -> None:
    for number, size in enumerate([(1, 1), (1, 5000), (5000, 1), (3, 2)]):
        Image.new("RGB", size, "lime").save(tmp_path / f"{number}.png")
    pictures = read_pictures(tmp_path, "a dog", resolution=RESOLUTION, full_resolution=FULL)
    pictures += read_pictures(tmp_path, "a pet", resolution=RESOLUTION, full_resolution=FULL, is_class=True)
    keys = {"patches__shape": shape, "patches__direction": direction, "train__steps": 8, "train__batch_size": 2}
    schedule = schedule_of(config(**keys), pictures)
    assert inside(schedule)
    assert {sample.picture for sample in samples(schedule)} == set(range(8))
    assert all(abs(group.size[0] * group.size[1] - 4096) < 0.15 * 4096 for group in schedule.groups)
    if direction == "random":
        cache = PictureCache()
        for group in schedule.groups:
            pixels = sample_pixels(schedule, group, cache)
            assert pixels.shape == (4, 3, group.size[1], group.size[0])
            assert [channel.round(decimals=5).unique().tolist() for channel in pixels.transpose(0, 1)] == [
                [-1],
                [1],
                [-1],
            ]
