"""Which blocks leave memory: the front and the tail, or a run inside; what is left is trained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Split:
    """The pair (n, m): the first ``front`` and the last ``tail`` blocks are skipped; blocks count in forward order.

    Args:
        inner: (start, stop) of a run that is skipped instead, with trained blocks on both sides; (0, 0) is none.
    """

    front: int
    tail: int
    inner: tuple[int, int] = (0, 0)

    @property
    def passes(self) -> int | None:
        """How many blocks must be run for what is stored of the skipped ones; None is all of them, and the head."""
        return None if self.tail else max(self.front, self.inner[1])

    def middle(self, num_blocks: int) -> Sequence[int]:
        """The indices of the blocks that are kept and trained, ascending.

        Raises:
            ValueError: a count is negative, or no block is left to train, or none on one side of ``inner``.
        """
        start, stop = self.inner
        if stop:
            if self.front or self.tail:
                raise ValueError(f"a run inside goes with no front and no tail, not with {self.front} and {self.tail}")
            if not 0 < start < stop < num_blocks:
                raise ValueError(
                    f"blocks {start} to {stop - 1} of 0 to {num_blocks - 1} leave none to train before or after them"
                )
            return (*range(start), *range(stop, num_blocks))
        if self.front < 0 or self.tail < 0:
            raise ValueError(f"front = {self.front} and tail = {self.tail} must not be negative")
        if self.front + self.tail >= num_blocks:
            raise ValueError(
                f"front = {self.front} and tail = {self.tail} leave no block of {num_blocks} to train; "
                f"their sum may be at most {num_blocks - 1}"
            )
        return range(self.front, num_blocks - self.tail)

    def skipped(self, num_blocks: int) -> tuple[int, ...]:
        """The indices of the skipped blocks, ascending."""
        trained = set(self.middle(num_blocks))
        return tuple(index for index in range(num_blocks) if index not in trained)


def skipped_count(ratio: float, num_blocks: int) -> int:
    """k = n + m = floor(ratio * L + 1/2): of FLUX.1's 57 blocks 17, 23, 29 at 30, 40, 50%.

    Raises:
        ValueError: the ratio is not in [0, 1), or it would leave no block.
    """
    if not 0 <= ratio < 1:
        raise ValueError(f"a skip ratio lies in [0, 1), not {ratio}")
    count = math.floor(ratio * num_blocks + 0.5)
    if count >= num_blocks:
        raise ValueError(f"a skip ratio of {ratio} leaves no block of {num_blocks} to train")
    return count


def split_for_ratio(ratio: float, num_blocks: int) -> Split:
    """The split for a ratio when no selection was made for the model.

    The shares are those the paper's selection found for FLUX.1 (section 4: (7, 10), (13, 10), (19, 10) of 57 blocks):
    the tail takes 10/57 of all blocks, at small ratios 10/17 of the skipped ones, and never more than a third of all;
    the front takes the rest. For 57 blocks this gives back the three published splits.
    """
    count = skipped_count(ratio, num_blocks)
    tail = min(math.floor(num_blocks * 10 / 57 + 0.5), math.floor(count * 10 / 17 + 0.5), num_blocks // 3)
    return Split(front=count - tail, tail=tail)
