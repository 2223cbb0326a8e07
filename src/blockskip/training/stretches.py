"""How a run is cut: each stretch precomputes what it needs, trains, and may be followed by previews."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Stretch:
    """Optimiser steps ``start`` to ``until``, and the groups whose features they need."""

    start: int
    until: int
    groups: list[int]


def stretches(
    done: int,
    steps: int,
    accumulation: int,
    groups: int,
    preview_every: int,
    room: Callable[[], int | None],
    limited: bool,
) -> Iterator[Stretch]:
    """The stretches that are left after ``done`` steps.

    Args:
        accumulation: micro-steps, and so groups, of one optimiser step.
        groups: distinct groups of the schedule; they are cycled.
        preview_every: a stretch also ends at every multiple of it; 0 means never.
        room: how many groups' features the disk may hold; None while that is not known. Asked before every stretch.
        limited: whether there is a disk budget.
    """
    if done >= steps:
        yield Stretch(steps, steps, [])
    while done < steps:
        until = steps
        if limited:
            fits = room()
            if fits is None:
                until = done + 1  # the first step tells how large a group is
            elif fits < groups:
                until = min(until, done + max(1, fits // accumulation))
        if preview_every:
            until = min(until, (done // preview_every + 1) * preview_every)
        # without a budget the first stretch precomputes for all: the blocks' weights are read once
        needed = range(done * accumulation, (until if limited else steps) * accumulation)
        yield Stretch(done, until, sorted({micro % groups for micro in needed}))
        done = until
