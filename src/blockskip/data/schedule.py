"""The schedule: every training sample of a run, fixed before the run begins.

A pure function of config, pictures and seed. What is drawn for sample j of group g depends on g and j alone: a longer
run, another pool or previews leave what came before as it was.

    pictures --epochs of permutations--> group 0: sample, sample, ...   micro-step 0, P, 2P, ...   (P groups, cycled)
                                         group 1: sample, sample, ...   micro-step 1, P + 1, ...
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from blockskip.config import Config
from blockskip.data.pictures import Picture, name_some
from blockskip.data.pixels import Box, load_pixels
from blockskip.data.sizes import patch_size, training_size
from blockskip.errors import UserError
from blockskip.method.flow import Distribution, sample_sigma
from blockskip.method.patches import cut_patch, patch_side, place_box
from blockskip.seeds import derive_seed, generator


@dataclass(frozen=True)
class Sample:
    """One training example.

    Args:
        picture: index in ``Schedule.pictures``.
        box: (left, top, width, height) of the patch in pixels of the scaled picture.
        flip: the patch is mirrored left to right.
        sigma: noise level in (0, 1].
        noise_seed: of ``seeds.gaussian``.
        caption: the text; empty when it is dropped.
        weight: in the loss; 1 for the subject, ``data.class_weight`` for class pictures.
    """

    picture: int
    box: Box
    flip: bool
    sigma: float
    noise_seed: int
    caption: str
    weight: float


@dataclass(frozen=True)
class Group:
    """The samples of one micro-batch: subject pictures first, class pictures after them.

    Args:
        index: its number; groups count from 0.
        samples: all of one training size.
        size: (width, height) in pixels that every patch is resized to.
    """

    index: int
    samples: tuple[Sample, ...]
    size: tuple[int, int]


@dataclass(frozen=True)
class Schedule:
    """All samples of a run.

    Args:
        pictures: what ``Sample.picture`` counts.
        groups: in the order of training; cycled when there are fewer than micro-steps.
        micro_steps: optimiser steps times accumulation.
    """

    pictures: tuple[Picture, ...]
    groups: tuple[Group, ...]
    micro_steps: int

    def group_of(self, micro_step: int) -> int:
        """The index of the group that a micro-step trains on; micro-steps count from 0."""
        return micro_step % len(self.groups)

    def captions(self) -> list[str]:
        """The distinct captions, in the order of their first use."""
        return list(dict.fromkeys(sample.caption for group in self.groups for sample in group.samples))


@dataclass(frozen=True)
class _Drawing:
    """What the draws of every sample have in common."""

    config: Config
    pictures: tuple[Picture, ...]
    resolution: int
    full_resolution: int
    stride: int
    distribution: Distribution
    shift: float

    def sample(self, group: int, number: int, index: int, size: tuple[int, int]) -> Sample:
        """Sample ``number`` of a group, of picture ``index``, for a training size."""
        seed, data, picture = self.config.train.seed, self.config.data, self.pictures[index]

        def uniform(purpose: str, count: int = 1) -> list[float]:
            drawn = generator(seed, "schedule", group, number, purpose)
            return [float(value) for value in torch.rand(count, generator=drawn, dtype=torch.float64)]

        levels = self.config.sigma
        drawn = generator(seed, "schedule", group, number, "sigma")
        sigma = sample_sigma(drawn, self.distribution, self.shift, levels.mean, levels.std)
        u, across, down = uniform("patch", 3)
        s_max = max(self.resolution, min(self.full_resolution, *picture.scaled))
        side = patch_side(sigma, self.resolution, s_max, self.stride, self.config.patches.direction, u)
        patch = patch_size(side, size, picture.scaled, self.resolution, self.stride)
        dropped = data.caption_dropout > 0 and uniform("dropout")[0] < data.caption_dropout
        return Sample(
            picture=index,
            box=place_box(picture.scaled, patch, (across, down)),
            flip=data.flip and uniform("flip")[0] < 0.5,
            sigma=sigma,
            noise_seed=derive_seed(seed, "schedule", group, number, "noise"),
            caption="" if dropped else picture.caption,
            weight=data.class_weight if picture.is_class else 1.0,
        )


def make_schedule(
    config: Config,
    pictures: Sequence[Picture],
    *,
    resolution: int,
    full_resolution: int,
    stride: int,
    distribution: Distribution,
    shift: float,
) -> Schedule:
    """The schedule of a run: as many groups as micro-steps, or ``features.pool`` of them when that is fewer.

    Every group has ``train.batch_size`` pictures of the subject and, when there are class pictures, as many of those.
    Pictures come in epochs of permutations that run on across groups. With ``patches.shape = "picture"`` the pictures
    of one training size form a bucket with permutations of its own, and each group is of the bucket that is furthest
    behind its share of the pictures; class pictures take the group's size. Warns when the groups are too few for every
    picture of the subject to be trained.

    Args:
        config: the run's settings; ``train.seed`` decides every draw.
        pictures: those of the subject and those of the class.
        resolution, full_resolution: s_min and s_max in pixels.
        stride: pixels that are one token of the transformer; sides are multiples of it.
        distribution, shift: of sigma, the family's where the config leaves them open.

    Raises:
        UserError: there is no picture of the subject, or the resolutions do not fit the stride or each other.
    """
    _check_sizes(pictures, resolution, full_resolution, stride)
    drawing = _Drawing(config, tuple(pictures), resolution, full_resolution, stride, distribution, shift)
    seed, batch_size = config.train.seed, config.train.batch_size
    micro_steps = config.train.steps * config.train.gradient_accumulation_steps
    count = min(config.features.pool or micro_steps, micro_steps)

    buckets: dict[tuple[int, int], list[int]] = {}
    for index, picture in enumerate(pictures):
        if not picture.is_class:
            square = config.patches.shape == "square"
            size = (resolution, resolution) if square else training_size(picture.scaled, resolution, stride)
            buckets.setdefault(size, []).append(index)
    sizes = sorted(buckets)
    subjects = [_endless(buckets[size], seed, "order", number) for number, size in enumerate(sizes)]
    class_pictures = [index for index, picture in enumerate(pictures) if picture.is_class]
    classes = _endless(class_pictures, seed, "order", "class")

    total, taken, groups = sum(map(len, buckets.values())), [0] * len(sizes), []
    for group in range(count):
        behind = [len(buckets[size]) * (group + 1) - total * taken[number] for number, size in enumerate(sizes)]
        bucket = behind.index(max(behind))
        taken[bucket] += 1
        indices = list(itertools.islice(subjects[bucket], batch_size))
        indices += itertools.islice(classes, batch_size)
        samples = (drawing.sample(group, number, index, sizes[bucket]) for number, index in enumerate(indices))
        groups.append(Group(group, tuple(samples), sizes[bucket]))
    schedule = Schedule(tuple(pictures), tuple(groups), micro_steps)
    _warn_unseen(schedule)
    return schedule


def sample_pixels(
    schedule: Schedule, group: Group, load: Callable[[Path, tuple[int, int], Box], torch.Tensor] = load_pixels
) -> torch.Tensor:
    """The patches of a group's samples at the training size, mirrored where the sample says so.

    Args:
        schedule: the schedule that the group belongs to.
        group: one of its groups.
        load: ``load_pixels``, or a ``PictureCache``.

    Returns:
        (B, 3, height, width) float32 in [-1, 1].
    """
    patches = []
    for sample in group.samples:
        picture = schedule.pictures[sample.picture]
        part = load(picture.path, picture.scaled, sample.box)
        patch = cut_patch(part, (0, 0, *sample.box[2:]), group.size)
        patches.append(patch.flip(-1) if sample.flip else patch)
    return torch.stack(patches)


def sample_places(schedule: Schedule, group: Group, stride: int) -> torch.Tensor:
    """Where the patches of a group's samples lie in their pictures; those of mirrored samples, in the mirrored picture.

    Args:
        stride: pixels that are one token.

    Returns:
        (B, 4) float32: left, top, width and height in tokens of the scaled picture.
    """
    places = []
    for sample in group.samples:
        left, top, width, height = sample.box
        if sample.flip:
            left = schedule.pictures[sample.picture].scaled[0] - left - width
        places.append([length / stride for length in (left, top, width, height)])
    return torch.tensor(places, dtype=torch.float32)


def _endless(members: Sequence[int], seed: int, *purpose: str | int) -> Iterator[int]:
    """The members epoch after epoch, each time in another order; nothing when there are none."""
    for epoch in itertools.count() if members else ():
        order = torch.randperm(len(members), generator=generator(seed, *purpose, epoch))
        yield from (members[place] for place in order.tolist())


def _check_sizes(pictures: Sequence[Picture], resolution: int, full_resolution: int, stride: int) -> None:
    problems = []
    if all(picture.is_class for picture in pictures):
        problems.append("data.images gives no picture to train on; give a folder of pictures of the subject.")
    if resolution < stride or resolution % stride:
        low = max(stride, resolution // stride * stride)
        near = f"{low} or {low + stride}"
        problems.append(f"data.resolution = {resolution} is not a multiple of the model's {stride} pixels; try {near}.")
    if resolution > full_resolution:
        problems.append(
            f"data.resolution = {resolution} is larger than data.full_resolution = {full_resolution}; "
            "make it smaller, or the full resolution larger."
        )
    if problems:
        raise UserError(problems)


def _warn_unseen(schedule: Schedule) -> None:
    seen = {sample.picture for group in schedule.groups for sample in group.samples}
    unseen = [
        picture.path.name for i, picture in enumerate(schedule.pictures) if i not in seen and not picture.is_class
    ]
    if unseen:
        warnings.warn(
            f"{len(schedule.groups)} groups are too few to train on every picture; left out: {name_some(unseen)}. "
            "Raise features.pool, train.steps or train.batch_size.",
            stacklevel=3,
        )
