"""A lock keeps other processes out as long as its own lives, and tells which that is."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from blockskip.locks import Locked, locked

#: Holds a lock until it is killed.
HOLDER = """
import sys, time
from pathlib import Path
from blockskip.locks import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(300)
"""


def test_it_is_let_go_of_when_its_process_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "a.lock"
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(file)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "held\n"
            with pytest.raises(Locked) as caught, locked(file):
                pytest.fail("it was held by two")
            assert caught.value.holder == f"process {process.pid}"
        finally:
            process.kill()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.lock", "a.pid"]
    with locked(file) as alone:
        assert alone and (tmp_path / "a.pid").read_text() == str(os.getpid())
    assert not list(tmp_path.iterdir())


def test_nothing_is_left_after_an_error_and_a_holder_that_wrote_no_name_is_another_process(tmp_path: Path) -> None:
    with pytest.raises(KeyError), locked(tmp_path / "a.lock"):
        (tmp_path / "a.pid").unlink()
        with pytest.raises(Locked, match=r"^another process$"), locked(tmp_path / "a.lock"):
            pytest.fail("it was held by two")
        raise KeyError
    assert not list(tmp_path.iterdir())


def test_who_waits_is_told_for_whom_and_goes_on_when_it_ends(tmp_path: Path) -> None:
    told, order, begun = [], [], threading.Event()
    end = threading.Event()

    def first() -> None:
        with locked(tmp_path / "a.lock"):
            begun.set()
            assert end.wait(60)
            order.append("first")

    def tell(holder: str) -> None:
        told.append(holder)
        end.set()

    thread = threading.Thread(target=first)
    thread.start()
    assert begun.wait(60)
    with locked(tmp_path / "a.lock", tell) as alone:
        order.append("second")
    thread.join()
    assert alone and order == ["first", "second"] and told == [f"process {os.getpid()}"]
    assert not list(tmp_path.iterdir())


def test_where_the_file_system_has_no_locks_nothing_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr("filelock.FileLock.acquire", refuse)
    with locked(tmp_path / "a.lock") as alone, locked(tmp_path / "a.lock") as another:
        assert (alone, another) == (False, False)
    assert not list(tmp_path.iterdir())
