"""Splits: the paper's counts, and that what is left is what was not taken."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockskip.method.split import Split, skipped_count, split_for_ratio


def test_flux_gives_the_paper_s_counts_and_splits() -> None:
    assert [skipped_count(ratio, 57) for ratio in (0.3, 0.4, 0.5)] == [17, 23, 29]
    assert [split_for_ratio(ratio, 57) for ratio in (0.3, 0.4, 0.5)] == [Split(7, 10), Split(13, 10), Split(19, 10)]


@given(st.floats(0, 1, exclude_max=True), st.integers(1, 200))
def test_a_ratio_leaves_a_middle_or_is_refused(ratio: float, num_blocks: int) -> None:
    count = math.floor(ratio * num_blocks + 0.5)
    if count >= num_blocks:
        with pytest.raises(ValueError, match="leaves no block"):
            split_for_ratio(ratio, num_blocks)
        return
    split = split_for_ratio(ratio, num_blocks)
    assert split.front + split.tail == skipped_count(ratio, num_blocks) == count
    assert min(split.front, split.tail) >= 0
    assert 3 * split.tail <= num_blocks
    assert len(split.middle(num_blocks)) == num_blocks - count


@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 80))
def test_skipped_and_middle_are_all_blocks_once(front: int, tail: int, num_blocks: int) -> None:
    split = Split(front, tail)
    if front + tail >= num_blocks:
        with pytest.raises(ValueError, match=f"leave no block of {num_blocks}"):
            split.middle(num_blocks)
        return
    middle, skipped = split.middle(num_blocks), split.skipped(num_blocks)
    assert sorted((*middle, *skipped)) == list(range(num_blocks))
    assert list(skipped) == sorted(skipped)
    assert [index for index in skipped if index < middle.start] == list(range(front))
    assert [index for index in skipped if index > middle.start] == list(range(num_blocks - tail, num_blocks))


@given(st.integers(0, 12), st.integers(0, 12), st.integers(1, 12))
def test_a_run_inside_leaves_blocks_on_both_sides(start: int, count: int, num_blocks: int) -> None:
    split = Split(0, 0, (start, start + count))
    if start + count == 0:
        assert split.skipped(num_blocks) == ()
    elif not (start and count and start + count < num_blocks):
        with pytest.raises(ValueError, match="leave none to train before or after"):
            split.middle(num_blocks)
    else:
        assert split.skipped(num_blocks) == tuple(range(start, start + count))
        assert sorted((*split.middle(num_blocks), *split.skipped(num_blocks))) == list(range(num_blocks))
        assert split.passes == start + count
    assert (Split(3, 0).passes, Split(3, 1).passes) == (3, None)


def test_a_run_inside_goes_alone() -> None:
    for front, tail in ((1, 0), (0, 1)):
        with pytest.raises(ValueError, match="no front and no tail"):
            Split(front, tail, (3, 5)).middle(10)


@pytest.mark.parametrize("split", [Split(-1, 2), Split(2, -1)])
def test_negative_counts_are_refused(split: Split) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        split.skipped(10)


@pytest.mark.parametrize("ratio", [-0.1, 1.0, 1.5, float("nan")])
def test_a_ratio_outside_its_range_is_refused(ratio: float) -> None:
    with pytest.raises(ValueError, match="lies in"):
        skipped_count(ratio, 57)
