"""Eq. 2 against brute force, and the sets of blocks that a probe masks."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockskip.method.selection import Masked, best_split, masked_sets, single_blocks
from blockskip.method.split import Split, skipped_count

DISTANCES = st.floats(0, 2, allow_nan=False)


@given(st.integers(2, 30), st.floats(0, 1, exclude_max=True), st.integers(1, 4), st.data())
def test_eq_2_is_the_best_of_all_pairs(num_blocks: int, ratio: float, models: int, data: st.DataObject) -> None:
    count = math.floor(ratio * num_blocks + 0.5)
    if not 0 < count < num_blocks:
        return
    assert skipped_count(ratio, num_blocks) == count
    table = st.lists(DISTANCES, min_size=count + 1, max_size=count + 1)
    front = [[0.0, *data.draw(table)[1:]] for _ in range(models)]  # D(x^j, first n masked)
    back = [[0.0, *data.draw(table)[1:]] for _ in range(models)]

    def mean(rows: list[list[float]]) -> list[float]:
        return [sum(row[i] for row in rows) / models for i in range(count + 1)]

    found = best_split(mean(front), mean(back), count)
    sums = {
        (n, m): sum(front[j][n] + back[j][m] for j in range(models))
        for n in range(count + 1)
        for m in range(count + 1)
        if n + m == count
    }
    assert found.front + found.tail == count
    assert sums[found.front, found.tail] == pytest.approx(min(sums.values()), abs=1e-12)


def test_of_equal_splits_the_one_with_the_smallest_tail() -> None:
    assert best_split([0.0] * 4, [0.0] * 4, 3) == Split(3, 0)
    assert best_split([0.0, 0.0, 0.0, 1.0], [0.0] * 4, 3) == Split(2, 1)
    assert best_split([0.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0], 3) == Split(0, 3)


def test_sweeps_that_are_too_short_or_no_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="both sweeps from 0 to 3"):
        best_split([0.0, 0.1, 0.2], [0.0, 0.1, 0.2, 0.3], 3)
    with pytest.raises(ValueError, match="not a number"):
        best_split([0.0, math.nan], [0.0, 0.1], 1)
    assert best_split([0.0, 0.1, math.nan], [0.0, 0.2, 0.1], 1) == Split(1, 0)  # what is not asked for is not looked at


def test_the_sets_of_a_probe() -> None:
    assert masked_sets(4, 2, 2) == [
        Masked("none", 0, ()),
        Masked("front", 1, (0,)),
        Masked("front", 2, (0, 1)),
        Masked("back", 1, (3,)),
        Masked("back", 2, (2, 3)),
        Masked("window", 0, (0, 1)),
        Masked("window", 1, (1, 2)),
        Masked("window", 2, (2, 3)),
    ]
    assert not [item for item in masked_sets(4, 2, 0) if item.kind == "window"]
    assert single_blocks(3) == [Masked("block", index, (index,)) for index in range(3)]
    for largest, width in ((0, 1), (4, 1), (2, 5), (2, -1)):
        with pytest.raises(ValueError, match="4 blocks"):
            masked_sets(4, largest, width)
