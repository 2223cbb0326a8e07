"""Which blocks leave memory: the front, the middle that is trained, and the tail."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Split:
    """The pair (n, m): the first ``front`` and the last ``tail`` blocks are skipped; blocks count in forward order."""

    front: int
    tail: int

    def middle(self, num_blocks: int) -> range:
        """The indices of the blocks that are kept and trained.

        Raises:
            ValueError: a count is negative, or no block is left to train.
        """
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
        middle = self.middle(num_blocks)
        return (*range(middle.start), *range(middle.stop, num_blocks))


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
