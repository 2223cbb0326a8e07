"""How often a run whose store is limited precomputes and trains in turn: by the run's own rule."""

from __future__ import annotations

from dataclasses import dataclass

from blockskip.planner.setting import Setting, disk_limit
from blockskip.training.stretches import stretches

#: Bytes of a group's file beside its tensors, at most: the header.
HEADER = 1024


@dataclass(frozen=True)
class Turn:
    """A stretch of precompute and training.

    Args:
        computed: groups whose features are computed in it.
        stored: groups whose features are on disk in it.
    """

    computed: int
    stored: int


def turns(setting: Setting, group_bytes: int) -> list[Turn]:
    """The stretches of a whole run; most runs have one, and one with ``preview.every`` trains in several.

    Args:
        group_bytes: of a group's features, 0 where none are stored.
    """
    config, limit, groups = setting.config, disk_limit(setting), setting.groups
    limit = limit if group_bytes else None
    fits = groups if limit is None else max(1, limit // (group_bytes + HEADER))
    every = config.preview.every if config.preview.prompts else 0
    found: list[Turn] = []
    there: set[int] = set()

    def room() -> int | None:
        return fits if found else None

    steps, accumulation = config.train.steps, config.train.gradient_accumulation_steps
    for stretch in stretches(0, steps, accumulation, groups, every, room, limit is not None):
        wanted = set(stretch.groups)
        missing = wanted - there
        there = wanted if fits < groups else there | wanted
        found.append(Turn(len(missing), len(there)))
    return found
