"""Which blocks to skip (Eq. 2, Algorithm 1): of all splits of a size, the one that hiding the text hurts least.

    (n*, m*) = argmin over n + m = k of  sum_j [ D(x^j, x^j with the first n blocks masked)
                                               + D(x^j, x^j with the last m blocks masked) ]

The sum falls into front(n) + back(k - n), so one sweep of n and one of m answer every k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from blockskip.method.split import Split

#: What a masked set of blocks is: all of them, the first ones, the last ones, some in a row, or one.
Kind = Literal["none", "front", "back", "window", "block"]


@dataclass(frozen=True)
class Masked:
    """A set of blocks whose image queries do not see the text.

    Args:
        kind: ``front``: the first ``number`` blocks; ``back``: the last ones; ``window``: blocks from ``number`` on;
            ``block``: block ``number`` alone; ``none``: no block.
        number: see ``kind``.
        blocks: their numbers, ascending.
    """

    kind: Kind
    number: int
    blocks: tuple[int, ...]


def masked_sets(num_blocks: int, largest: int, width: int) -> list[Masked]:
    """The sets of one probe: none, the first 1..largest, the last 1..largest, and every window of ``width`` blocks.

    Args:
        num_blocks: L.
        largest: the largest k = n + m that is asked for.
        width: blocks in a window; 0 for no windows.

    Raises:
        ValueError: a number does not suit the model.
    """
    if not 1 <= largest < num_blocks:
        raise ValueError(f"of {num_blocks} blocks 1 to {num_blocks - 1} can be masked at an end, not {largest}")
    if not 0 <= width <= num_blocks:
        raise ValueError(f"a window of {num_blocks} blocks has 0 to {num_blocks} of them, not {width}")
    everything = range(num_blocks)
    sets = [Masked("none", 0, ())]
    sets += [Masked("front", count, tuple(everything[:count])) for count in range(1, largest + 1)]
    sets += [Masked("back", count, tuple(everything[-count:])) for count in range(1, largest + 1)]
    if width:
        starts = range(num_blocks - width + 1)
        sets += [Masked("window", start, tuple(everything[start : start + width])) for start in starts]
    return sets


def single_blocks(num_blocks: int) -> list[Masked]:
    """Each block alone."""
    return [Masked("block", index, (index,)) for index in range(num_blocks)]


def best_split(front: Sequence[float], back: Sequence[float], count: int) -> Split:
    """Eq. 2 for k = ``count``; of equal sums the split with the smallest tail, since a skipped front is exact.

    Args:
        front: front(n), the mean distance with the first n blocks masked, for n = 0..count; front(0) = 0.
        back: back(m) with the last m blocks masked.

    Raises:
        ValueError: a sweep is shorter than count + 1, or a distance is not a number.
    """
    if count < 0 or min(len(front), len(back)) <= count:
        raise ValueError(f"a split of {count} blocks needs both sweeps from 0 to {count}")
    if any(value != value for value in (*front[: count + 1], *back[: count + 1])):
        raise ValueError("a distance is not a number")
    tail = min(range(count + 1), key=lambda m: (front[count - m] + back[m], m))
    return Split(count - tail, tail)
