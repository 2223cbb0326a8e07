"""The schedule: what it depends on, that every picture has its turn, where patches lie."""

import dataclasses
import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

from blockskip.data.schedule import Sample, make_schedule
from blockskip.errors import UserError
from blockskip.method.patches import patch_side
from tests.data.gallery import (
    FULL,
    LANDSCAPE,
    PORTRAIT,
    RESOLUTION,
    SQUARE,
    STRIDE,
    config,
    gallery,
    inside,
    samples,
    schedule_of,
)

DIRECTIONS = ["low-to-high", "high-to-low", "random", "fixed"]

sizes = st.tuples(st.integers(1, 700), st.integers(1, 700))
configs = st.fixed_dictionaries(
    {
        "train__seed": st.integers(0, 5),
        "train__batch_size": st.integers(1, 3),
        "patches__shape": st.sampled_from(["square", "picture"]),
        "patches__direction": st.sampled_from(DIRECTIONS),
        "data__flip": st.booleans(),
        "data__caption_dropout": st.sampled_from([0.0, 0.3]),
    }
)


@limits(max_examples=25)
@given(keys=configs, pictures=st.lists(sizes, min_size=1, max_size=6), classes=st.lists(sizes, max_size=3))
def test_a_longer_run_or_another_pool_changes_no_earlier_group(
    keys: dict[str, Any], pictures: list[tuple[int, int]], classes: list[tuple[int, int]]
) -> None:
    both = gallery(*pictures) + gallery(*classes, is_class=True)
    long = schedule_of(config(**keys, train__steps=24), both)
    assert schedule_of(config(**keys, train__steps=24), both) == long
    assert schedule_of(config(**keys, train__steps=9), both).groups == long.groups[:9]
    assert schedule_of(config(**keys, train__steps=6, train__gradient_accumulation_steps=4), both).groups == long.groups
    pooled = schedule_of(config(**keys, train__steps=24, features__pool=5), both)
    assert pooled.groups == long.groups[:5]
    assert pooled.micro_steps == long.micro_steps == 24
    assert [pooled.group_of(step) for step in range(12)] == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    assert [long.group_of(step) for step in range(24)] == list(range(24))
    assert inside(long)
    assert {len(group.samples) for group in long.groups} == {keys["train__batch_size"] * (2 if classes else 1)}


def test_a_pool_larger_than_the_run_is_the_run() -> None:
    assert len(schedule_of(config(features__pool=21), gallery(SQUARE)).groups) == 20
    assert len(schedule_of(config(features__pool=20), gallery(SQUARE)).groups) == 20


def test_another_seed_changes_everything_that_is_drawn() -> None:
    keys = {"data__flip": True, "data__caption_dropout": 0.5, "train__steps": 60}
    first, second = (samples(schedule_of(config(**keys, train__seed=s), gallery(*[SQUARE] * 5))) for s in (0, 1))
    for field in dataclasses.fields(Sample):
        if field.name != "weight":
            assert [getattr(s, field.name) for s in first] != [getattr(s, field.name) for s in second]
    assert not {sample.noise_seed for sample in first} & {sample.noise_seed for sample in second}
    assert len({sample.noise_seed for sample in first}) == len(first)


def test_draws_for_one_purpose_do_not_shift_those_for_another() -> None:
    pictures, classes = gallery(*[LANDSCAPE] * 4), gallery(SQUARE, PORTRAIT, is_class=True)
    plain = schedule_of(config(), pictures)
    for other in [
        schedule_of(config(data__flip=True, data__caption_dropout=0.5), pictures),
        schedule_of(config(), pictures + classes),
        schedule_of(config(train__batch_size=1, data__class_weight=0.5), pictures + classes),
    ]:
        for before, after in zip(plain.groups, other.groups, strict=True):
            kept = dataclasses.replace(after.samples[0], flip=False, caption=before.samples[0].caption)
            assert kept == before.samples[0]
    shifted = samples(schedule_of(config(), pictures, shift=3.0))
    assert [sample.picture for sample in shifted] == [sample.picture for sample in samples(plain)]
    assert all(after.sigma > before.sigma for before, after in zip(samples(plain), shifted, strict=True))


def test_the_global_random_state_is_neither_used_nor_changed() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = schedule_of(config(data__flip=True), gallery(SQUARE, LANDSCAPE))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert schedule_of(config(data__flip=True), gallery(SQUARE, LANDSCAPE)) == first


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 7])
def test_epochs_run_on_across_groups_and_every_picture_has_its_turn(batch_size: int) -> None:
    count = 5
    taken = [s.picture for s in samples(schedule_of(config(train__batch_size=batch_size), gallery(*[SQUARE] * count)))]
    epochs = [taken[start : start + count] for start in range(0, len(taken) - count + 1, count)]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_one_picture_fills_a_batch_of_four() -> None:
    schedule = schedule_of(config(train__batch_size=4, data__flip=True, patches__direction="random"), gallery(SQUARE))
    assert all([sample.picture for sample in group.samples] == [0] * 4 for group in schedule.groups)
    for draw in ("sigma", "noise_seed"):
        assert all(len({getattr(sample, draw) for sample in group.samples}) == 4 for group in schedule.groups)
    assert all(len({sample.box for sample in group.samples}) > 1 for group in schedule.groups)
    assert sum(len({sample.flip for sample in group.samples}) > 1 for group in schedule.groups) > 10


@limits(max_examples=25)
@given(pictures=st.lists(sizes, min_size=1, max_size=8), batch_size=st.integers(1, 3))
def test_buckets_get_their_share_and_a_group_has_one_size(pictures: list[tuple[int, int]], batch_size: int) -> None:
    keys = {"patches__shape": "picture", "train__batch_size": batch_size, "train__steps": 40}
    schedule = schedule_of(config(**keys), gallery(*pictures))
    bucket: dict[int, tuple[int, int]] = {}
    for group in schedule.groups:
        for sample in group.samples:
            assert bucket.setdefault(sample.picture, group.size) == group.size
    assert len(bucket) == len(pictures)  # 40 groups are enough for 8 pictures
    shares = Counter(bucket.values())
    for length in range(1, 41):
        given = Counter(group.size for group in schedule.groups[:length])
        for size, count in shares.items():
            assert abs(given[size] - length * count / len(pictures)) < len(shares)
    for size in shares:
        turns = Counter(s.picture for group in schedule.groups if group.size == size for s in group.samples)
        assert max(turns.values()) - min(turns[index] for index in bucket if bucket[index] == size) <= 1


def test_a_single_portrait_among_landscapes_is_trained() -> None:
    keys = {"patches__shape": "picture", "train__batch_size": 2, "train__steps": 6}
    schedule = schedule_of(config(**keys), gallery(*[LANDSCAPE] * 5, PORTRAIT))
    assert {sample.picture for sample in samples(schedule)} == set(range(6))
    assert Counter(group.size for group in schedule.groups) == {(80, 56): 5, (56, 80): 1}


def test_pictures_that_are_never_trained_are_warned_about() -> None:
    options: dict[str, Any] = {"resolution": 64, "full_resolution": 128, "stride": 8, "shift": 1.0}
    with pytest.warns(UserWarning, match=r"2 groups are too few.*features\.pool"):
        make_schedule(config(features__pool=2), gallery(*[SQUARE] * 3), distribution="uniform", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        both = gallery(*[SQUARE] * 3) + gallery(*[SQUARE] * 50, is_class=True)
        make_schedule(config(features__pool=3), both, distribution="uniform", **options)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_square_patch_has_the_side_of_equation_1(direction: str) -> None:
    pictures = gallery((300, 200), (90, 100), (70, 64))
    schedule = schedule_of(config(train__steps=500, patches__direction=direction), pictures)
    assert {group.size for group in schedule.groups} == {(64, 64)}
    for sample in samples(schedule):
        s_max = min(FULL, *pictures[sample.picture].scaled)
        assert sample.box[2] == sample.box[3]
        assert sample.box[2] % STRIDE == 0
        if direction != "random":
            side = patch_side(sample.sigma, RESOLUTION, s_max, STRIDE, direction)  # type: ignore[arg-type]
            assert sample.box[2] == side
    large = [(s.sigma, s.box[2]) for s in samples(schedule) if s.picture == 0]
    assert {side for _, side in large} == ({128} if direction == "fixed" else set(range(64, 129, 8)))
    correlation = 0 if direction == "fixed" else np.corrcoef(np.array(large).T)[0, 1]
    low, high = {"low-to-high": (0.98, 1), "high-to-low": (-1, -0.98)}.get(direction, (-0.35, 0.35))
    assert low <= correlation <= high


def test_patches_of_a_picture_s_shape_have_its_aspect_and_the_area_of_the_square() -> None:
    pictures = gallery((300, 200), (200, 300), (150, 150), (400, 100), (100, 2000))
    schedule = schedule_of(config(train__steps=600, patches__shape="picture"), pictures)
    training = {sample.picture: group.size for group in schedule.groups for sample in group.samples}
    assert training == {0: (80, 56), 1: (56, 80), 2: (64, 64), 3: (128, 32), 4: (32, 128)}
    areas: dict[int, list[float]] = {}
    for group in schedule.groups:
        for sample in group.samples:
            width, height = sample.box[2:]
            assert width % STRIDE == height % STRIDE == 0
            assert width >= group.size[0]
            assert height >= group.size[1]
            across, down = width / group.size[0], height / group.size[1]
            assert abs(across - down) <= STRIDE / 2 / group.size[0] + STRIDE / 2 / group.size[1]
            areas.setdefault(sample.picture, []).append((width * height) ** 0.5)
    for index, picture in enumerate(pictures):
        assert min(areas[index]) == pytest.approx(64, rel=0.06)
        assert max(areas[index]) == pytest.approx(min(FULL, *picture.scaled), rel=0.06)


def test_patches_lie_anywhere_in_the_picture() -> None:
    schedule = schedule_of(config(train__steps=600, patches__direction="high-to-low"), gallery((300, 200)))
    places = [((b[0] / (192 - b[2])), (b[1] / (128 - b[3]))) for b in (s.box for s in samples(schedule)) if b[2] < 96]
    for axis in np.array(places).T:
        assert np.histogram(axis, 4, (0, 1))[0].min() > len(places) / 4 * 0.7
    assert abs(np.corrcoef(np.array(places).T)[0, 1]) < 0.15


def test_side_and_place_of_a_patch_are_drawn_apart() -> None:
    schedule = schedule_of(config(train__steps=600, patches__direction="random"), gallery((300, 300)))
    boxes = [sample.box for sample in samples(schedule) if sample.box[2] < 112]
    drawn = [(box[2], box[0] / (128 - box[2]), box[1] / (128 - box[2])) for box in boxes]
    assert np.abs(np.corrcoef(np.array(drawn).T) - np.eye(3)).max() < 0.15


def test_sigma_follows_the_distribution_of_family_and_config() -> None:
    def drawn(**options: Any) -> np.ndarray[Any, Any]:
        keys = {name: options.pop(name) for name in list(options) if "__" in name}
        return np.sort(
            [s.sigma for s in samples(schedule_of(config(train__steps=2000, **keys), gallery(SQUARE), **options))]
        )

    grid = (np.arange(2000) + 0.5) / 2000
    assert np.abs(drawn() - grid).max() < 0.035
    assert np.abs(drawn(shift=3.0) - 3 * grid / (1 + 2 * grid)).max() < 0.035
    normal = drawn(distribution="logit-normal", sigma__mean=0.5, sigma__std=0.7)
    logits = np.log(normal / (1 - normal))
    assert abs(logits.mean() - 0.5) < 0.05
    assert abs(logits.std() - 0.7) < 0.05


def test_flip_and_caption_dropout_have_their_share() -> None:
    pictures = gallery(*[SQUARE] * 4)
    drawn = samples(schedule_of(config(train__steps=2000, data__flip=True, data__caption_dropout=0.1), pictures))
    assert abs(sum(sample.flip for sample in drawn) / 2000 - 0.5) < 0.04
    assert abs(sum(sample.caption == "" for sample in drawn) / 2000 - 0.1) < 0.025
    assert all(sample.caption in ("", pictures[sample.picture].caption) for sample in drawn)
    assert {s.caption for s in samples(schedule_of(config(data__caption_dropout=1.0), pictures))} == {""}
    plain = samples(schedule_of(config(), pictures))
    assert not any(sample.flip or sample.caption == "" for sample in plain)


def test_captions_are_listed_once_in_the_order_of_their_use() -> None:
    schedule = schedule_of(config(data__caption_dropout=0.3), gallery(*[SQUARE] * 4))
    used = [sample.caption for sample in samples(schedule)]
    assert schedule.captions() == sorted(set(used), key=used.index)
    assert "" in schedule.captions()


def test_class_pictures_follow_with_their_weight_and_caption() -> None:
    both = gallery(LANDSCAPE, PORTRAIT) + gallery(SQUARE, PORTRAIT, LANDSCAPE, is_class=True)
    for shape in ("square", "picture"):
        keys = {"train__batch_size": 2, "data__class_weight": 0.25, "patches__shape": shape}
        schedule = schedule_of(config(**keys), both)
        for group in schedule.groups:
            assert [sample.weight for sample in group.samples] == [1, 1, 0.25, 0.25]
            assert [both[sample.picture].is_class for sample in group.samples] == [False, False, True, True]
            assert all(sample.caption == both[sample.picture].caption for sample in group.samples)
        assert inside(schedule)
        turns = Counter(sample.picture for sample in samples(schedule) if sample.picture >= 2)
        assert max(turns.values()) - min(turns.values()) <= 1


def test_class_pictures_of_another_shape_are_not_squeezed() -> None:
    both = gallery((400, 150)) + gallery((150, 400), (100, 100), is_class=True)
    schedule = schedule_of(config(patches__shape="picture", patches__direction="fixed"), both)
    for group in schedule.groups:
        width, height = group.samples[1].box[2:]
        assert group.size == (104, 40)
        assert width / height == pytest.approx(104 / 40, rel=0.1)


def test_pictures_that_were_scaled_too_small_do_not_stop_the_schedule() -> None:
    small = [
        dataclasses.replace(p, scaled=s)
        for p, s in zip(gallery(*[SQUARE] * 3), [(5, 3), (64, 7), (9, 90)], strict=True)
    ]
    for shape in ("square", "picture"):
        assert inside(schedule_of(config(patches__shape=shape), small))


def test_all_problems_of_sizes_come_at_once_and_name_their_key() -> None:
    with pytest.raises(UserError) as caught:
        schedule_of(config(), gallery(SQUARE, is_class=True), resolution=140)
    assert [problem.split()[0] for problem in caught.value.problems] == [
        "data.images",
        "data.resolution",
        "data.resolution",
    ]
    assert "136 or 144" in caught.value.problems[1]
    assert "data.full_resolution = 128" in caught.value.problems[2]
    with pytest.raises(UserError, match="try 32 or 64"):
        schedule_of(config(), gallery(SQUARE), resolution=16, stride=32)
    with pytest.raises(UserError, match="larger than"):
        schedule_of(config(), gallery(SQUARE), resolution=136)
