"""Splits that were measured for known models, as data."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from blockskip.method.split import Split, skipped_count, split_for_ratio


@dataclass(frozen=True)
class Preset:
    """A measured split.

    Args:
        family: name of the architecture.
        blocks: how many blocks each of the transformer's lists has, in forward order.
        split: the pair (n, m).
        source: who measured it, and how.
    """

    family: str
    blocks: tuple[int, ...]
    split: Split
    source: str


@functools.cache
def presets() -> tuple[Preset, ...]:
    """All of them, in the file's order."""
    text = Path(__file__).with_name("splits.toml").read_text(encoding="utf-8")
    return tuple(
        Preset(entry["family"], tuple(entry["blocks"]), Split(entry["front"], entry["tail"]), entry["source"])
        for entry in tomllib.loads(text)["split"]
    )


def split_for(family: str, blocks: Sequence[int], ratio: float) -> tuple[Split, str | None]:
    """The split of a model for a skip ratio, and who measured it; None where the paper's shares were scaled.

    Args:
        family: name of the architecture.
        blocks: how many blocks each of the transformer's lists has.
        ratio: share of all blocks that is skipped; k = floor(ratio * L + 1/2).

    Raises:
        ValueError: the ratio is not in [0, 1), or it would leave no block.
    """
    count = skipped_count(ratio, sum(blocks))
    for preset in _of(family, blocks):
        if preset.split.front + preset.split.tail == count:
            return preset.split, preset.source
    return split_for_ratio(ratio, sum(blocks)), None if count else "nothing is skipped"


def _of(family: str, blocks: Sequence[int]) -> tuple[Preset, ...]:
    """Those of one model, whatever their ratio."""
    return tuple(item for item in presets() if (item.family, item.blocks) == (family, tuple(blocks)))


def unmeasured(split: Split, family: str = "", blocks: Sequence[int] = ()) -> str:
    """The sentence for a split that was scaled from the paper's shares: what it is, and how to find a better one.

    Args:
        family, blocks: of the model, as of ``split_for``; one with splits for other ratios has been measured.
    """
    if _of(family, blocks):
        return (
            f"The first {split.front} and the last {split.tail} blocks are skipped, the paper's shares for FLUX.1, "
            "scaled: this model has no split for this ratio that was trained with. What was measured of its blocks "
            "stands in docs/selection.md; `blockskip select` measures them for any ratio."
        )
    return (
        f"Nobody has measured which blocks of this model matter: the first {split.front} and the last {split.tail} "
        "are skipped, the paper's shares for FLUX.1. `blockskip select` measures it."
    )
