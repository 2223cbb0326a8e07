"""Groups written by threads: all of them, whole, and what goes wrong is raised."""

import threading
from pathlib import Path

import pytest
import torch

from blockskip.errors import RunError
from blockskip.store import behind
from blockskip.store.behind import write_behind
from blockskip.store.groups import GroupStore


def test_everything_is_stored_when_the_context_ends(tmp_path: Path) -> None:
    store = GroupStore(tmp_path)
    groups = {f"{number:032x}": {"x": torch.full((3,), float(number))} for number in range(40)}
    with store.write_behind() as write:
        for key, group in groups.items():
            write(key, group)
    again = GroupStore(tmp_path)
    for key, group in groups.items():
        assert torch.equal(again.read(key)["x"], group["x"])
    lines = (tmp_path / "manifest.jsonl").read_text().splitlines()
    assert len(lines) == len(groups)
    assert store.size() == again.size()


def test_few_groups_wait_at_a_time() -> None:
    taken, free = 0, threading.Event()

    def write(key: str, group: dict[str, torch.Tensor]) -> None:
        free.wait(10)

    with write_behind(write) as put:
        for _ in range(behind.THREADS + behind.WAITING):
            put("a", {})
            taken += 1
        late = threading.Timer(0.1, free.set)
        late.start()
        assert not free.is_set()
        put("a", {})  # waits until one is written
        assert free.is_set()
    assert taken == behind.THREADS + behind.WAITING


@pytest.mark.parametrize("bad", [0, 30])
def test_what_goes_wrong_is_raised_and_the_rest_is_given_up(bad: int) -> None:
    written: list[str] = []

    def write(key: str, group: dict[str, torch.Tensor]) -> None:
        if key == str(bad):
            raise RunError("the disk is full")
        written.append(key)

    with pytest.raises(RunError, match="the disk is full"), write_behind(write) as put:
        for number in range(31):
            put(str(number), {})
    assert str(bad) not in written
    assert not [thread for thread in threading.enumerate() if "write-behind" in thread.name]


def test_an_error_inside_ends_the_threads() -> None:
    with pytest.raises(KeyError), write_behind(lambda key, group: None) as put:
        put("a", {})
        raise KeyError
    assert not [thread for thread in threading.enumerate() if "write-behind" in thread.name]
