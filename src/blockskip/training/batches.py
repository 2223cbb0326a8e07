"""The micro-batches of a run, in order: what is stored, read ahead, beside what the schedule draws."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from blockskip.data.noise import noise, sigmas, weights
from blockskip.data.schedule import Group
from blockskip.families import Text, stack_text
from blockskip.store.groups import GroupStore
from blockskip.training.step import MicroBatch


def micro_batches(
    order: Sequence[int],
    groups: Sequence[Group],
    texts: Mapping[str, Text],
    pixels: tuple[GroupStore, Sequence[str]],
    features: tuple[GroupStore, Sequence[str]] | None,
    places: Sequence[torch.Tensor | None] | None = None,
) -> Iterator[MicroBatch]:
    """The micro-batches of the groups in ``order``, each valid until the next one is asked for.

    Args:
        groups: of the schedule.
        texts: conditioning of every caption.
        pixels: the store of latents and the key of every group in it.
        features: the same of features; None when nothing stands in for blocks.
        places: of every group's patches in their pictures; None where no patch keeps its place.
    """
    store, keys = pixels
    encoded = store.read_ahead([keys[index] for index in order])
    stored = features[0].read_ahead([features[1][index] for index in order]) if features else ({} for _ in order)
    for index, tensors, found in zip(order, encoded, stored, strict=True):
        samples, latents = groups[index].samples, tensors["latents"]
        text = stack_text([texts[sample.caption] for sample in samples])
        drawn = (noise(samples, latents.shape[1:]), sigmas(samples), weights(samples))
        yield MicroBatch(latents, *drawn, text, found, places and places[index])
