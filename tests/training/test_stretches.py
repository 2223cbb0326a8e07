"""How a run is cut into stretches."""

from hypothesis import given
from hypothesis import strategies as st

from blockskip.training.stretches import Stretch, stretches


def cut(done: int, steps: int, accumulation: int, groups: int, every: int, room: list[int | None]) -> list[Stretch]:
    rooms = iter(room)
    return list(stretches(done, steps, accumulation, groups, every, lambda: next(rooms), bool(room)))


def test_without_limits_there_is_one() -> None:
    """And all features are precomputed in it."""
    assert cut(0, 3, 2, 6, 0, []) == [Stretch(0, 3, [0, 1, 2, 3, 4, 5])]
    assert cut(2, 3, 2, 6, 0, []) == [Stretch(2, 3, [4, 5])]


def test_nothing_is_left_to_train_but_to_save() -> None:
    assert cut(3, 3, 2, 6, 0, []) == [Stretch(3, 3, [])]
    assert cut(5, 3, 2, 6, 1, []) == [Stretch(3, 3, [])]


def test_previews_cut() -> None:
    assert [(s.start, s.until) for s in cut(0, 7, 1, 7, 3, [])] == [(0, 3), (3, 6), (6, 7)]
    assert [(s.start, s.until) for s in cut(4, 7, 1, 7, 3, [])] == [(4, 6), (6, 7)]


def test_the_first_step_tells_how_large_a_group_is() -> None:
    assert [(s.start, s.until) for s in cut(0, 9, 2, 18, 0, [None, 8, 8, 8])] == [(0, 1), (1, 5), (5, 9)]
    assert cut(0, 9, 2, 18, 0, [None, 18])[1] == Stretch(1, 9, list(range(2, 18)))
    assert [s.until for s in cut(0, 3, 4, 12, 0, [1, 1, 1])] == [1, 2, 3]  # less than a step's groups: still a step


def test_a_pool_is_cycled() -> None:
    assert cut(0, 3, 2, 4, 0, [])[0].groups == [0, 1, 2, 3]
    assert [s.groups for s in cut(0, 3, 2, 4, 1, [None, 3, 3])] == [[0, 1], [2, 3], [0, 1]]
    assert [s.groups for s in cut(0, 3, 2, 4, 1, [])] == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1]]


@given(
    st.integers(0, 20), st.integers(1, 20), st.integers(1, 4), st.integers(1, 30), st.integers(0, 5),
    st.none() | st.integers(1, 40),
)  # fmt: skip
def test_every_step_is_in_one_stretch(
    done: int, steps: int, accumulation: int, groups: int, every: int, room: int | None
) -> None:
    found = cut(done, steps, accumulation, groups, every, [] if room is None else [None, *[room] * steps])
    assert found[-1].until == steps
    for stretch, following in zip(found, [*found[1:], None], strict=True):
        assert following is None or stretch.until == following.start
        micro = range(stretch.start * accumulation, (steps if room is None else stretch.until) * accumulation)
        assert stretch.groups == sorted({number % groups for number in micro})
        if room is not None and room < groups and stretch.until - stretch.start > 1:
            assert len(stretch.groups) <= room
        if every:
            assert not any(step % every == 0 for step in range(stretch.start + 1, stretch.until))
