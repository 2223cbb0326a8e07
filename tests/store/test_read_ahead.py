"""Reading ahead: the same groups in the same order, few buffers, no thread left."""

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from blockskip.store.groups import GroupStore, StoreError
from tests.store.groups import KEYS, group, same


@pytest.fixture
def filled(tmp_path: Path) -> GroupStore:
    store = GroupStore(tmp_path)
    for seed, key in enumerate(KEYS):
        store.write(key, group(seed))
    return store


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not threads()


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "read-ahead" in thread.name]


@pytest.mark.parametrize("depth", [1, 2, 5, 20])
def test_it_reads_what_read_reads_in_order(filled: GroupStore, depth: int) -> None:
    order = [*range(8), 3, 3, 0]
    groups = filled.read_ahead([KEYS[seed] for seed in order], depth)
    for seed in order:
        assert same(next(groups), group(seed))
    assert list(groups) == []


def test_nothing_to_read(filled: GroupStore) -> None:
    assert list(filled.read_ahead([])) == []
    with pytest.raises(ValueError, match="depth"):
        filled.read_ahead(KEYS, depth=0)


@pytest.mark.parametrize("depth", [1, 3])
def test_buffers_are_used_over_and_over(filled: GroupStore, depth: int) -> None:
    places = [g["front"].data_ptr() for g in filled.read_ahead(KEYS * 5, depth)]
    assert len(set(places)) <= depth + 1
    assert all(one != other for one, other in itertools.pairwise(places))


def test_a_group_stays_as_it_is_until_the_next_is_asked_for(filled: GroupStore) -> None:
    for seed, read in zip(list(range(8)) * 2, filled.read_ahead(KEYS * 2, depth=2), strict=True):
        time.sleep(0.005)  # the thread reads as far as it may
        assert same(read, group(seed))


def test_it_reads_depth_groups_ahead_and_no_more(filled: GroupStore, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    reading = GroupStore.read
    monkeypatch.setattr(GroupStore, "read", lambda self, key, into: begun.append(key) or reading(self, key, into))
    groups = filled.read_ahead(KEYS, depth=2)
    assert begun == []
    for taken in range(1, 5):
        next(groups)
        deadline = time.monotonic() + 5
        while len(begun) < taken + 2 and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(0.02)
        assert begun == KEYS[: taken + 2]
    groups.close()


def test_an_error_comes_at_the_turn_of_its_group(filled: GroupStore) -> None:
    filled.path(KEYS[4]).write_bytes(b"damaged")
    groups = filled.read_ahead(KEYS, depth=3)
    for seed in range(4):
        assert same(next(groups), group(seed))
    with pytest.raises(StoreError, match=KEYS[4]):
        next(groups)
    assert not threads()
    assert list(groups) == []


def test_closing_early_ends_the_thread(filled: GroupStore) -> None:
    for taken in range(3):
        groups = filled.read_ahead(KEYS * 100, depth=1)
        for _ in range(taken):
            next(groups)
        groups.close()
        assert not threads()


def test_an_iterator_that_is_dropped_or_fails_ends_its_thread(filled: GroupStore) -> None:
    next(filled.read_ahead(KEYS * 100))
    assert not threads()
    with pytest.raises(ZeroDivisionError):
        for _ in filled.read_ahead(KEYS * 100):
            raise ZeroDivisionError
    assert not threads()


def test_two_iterators_have_buffers_of_their_own(filled: GroupStore) -> None:
    one, other = filled.read_ahead(KEYS), filled.read_ahead(KEYS[::-1])
    for seed, (left, right) in enumerate(zip(one, other, strict=True)):
        assert same(left, group(seed))
        assert same(right, group(7 - seed))
