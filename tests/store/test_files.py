"""Files are whole or absent, and nothing is left beside them."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from blockskip.store.files import remove_stale_temporaries, write_atomically


def test_a_file_is_made_and_replaced_in_the_same_folder(tmp_path: Path) -> None:
    seen: list[Path] = []
    for text in ("first", "second"):
        write_atomically(tmp_path / "a.txt", lambda path, text=text: (seen.append(path), path.write_text(text)))  # type: ignore[misc]
        assert (tmp_path / "a.txt").read_text() == text
    assert {path.parent for path in seen} == {tmp_path}
    assert len(set(seen)) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), OSError(errno.ENOSPC, "full")])
def test_a_failure_leaves_the_old_file_and_no_temporary(tmp_path: Path, error: BaseException) -> None:
    (tmp_path / "a.txt").write_text("old")

    def write(path: Path) -> None:
        path.write_text("half")
        raise error

    with pytest.raises(type(error)):
        write_atomically(tmp_path / "a.txt", write)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "old"


@pytest.mark.parametrize(("code", "attempts"), [(errno.EIO, 2), (errno.ENOSPC, 1)])
def test_a_failing_disk_is_tried_once_more_unless_it_is_full(tmp_path: Path, code: int, attempts: int) -> None:
    calls: list[Path] = []

    def write(path: Path) -> None:
        calls.append(path)
        path.write_text("half")
        raise OSError(code, "failed")

    with pytest.raises(OSError, match="failed"):
        write_atomically(tmp_path / "a.txt", write)
    assert len(calls) == attempts
    assert list(tmp_path.iterdir()) == []


def test_a_second_attempt_can_succeed(tmp_path: Path) -> None:
    failures = [OSError(errno.EIO, "failed")]

    def write(path: Path) -> None:
        path.write_text("whole")
        if failures:
            raise failures.pop()

    write_atomically(tmp_path / "a.txt", write)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a.txt": "whole"}


def test_the_bytes_are_on_the_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def noting_fsync(descriptor: int) -> None:
        order.append("flush")
        fsync(descriptor)

    def noting_replace(self: Path, target: Path) -> Path:
        order.append("rename")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(Path, "replace", noting_replace)
    write_atomically(tmp_path / "a.txt", lambda path: path.write_text("whole"))
    assert order[:2] == ["flush", "rename"]
    assert os.name == "nt" or order == ["flush", "rename", "flush"]


def test_only_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    tail = "0123456789abcdef" * 2
    stale = tmp_path / f".a.txt.{ended.pid}-{tail}.tmp"
    kept = ["a.txt", ".a.txt.tmp", "b.tmp", f".a.txt.{os.getpid()}-{tail}.tmp", f"a.txt.{ended.pid}-{tail}.tmp"]
    if os.name == "nt":
        kept.pop(3)
    for path in [stale, *(tmp_path / name for name in kept)]:
        path.touch()
    remove_stale_temporaries(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


def test_what_a_killed_process_left_is_recognised(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, sys; from blockskip.store.files import write_atomically\n"
        "write_atomically(pathlib.Path(sys.argv[1]), lambda path: (path.write_text('half'), os._exit(1)))"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.txt")], check=False)
    (left,) = tmp_path.iterdir()
    assert left.suffix == ".tmp"
    remove_stale_temporaries(tmp_path)
    assert list(tmp_path.iterdir()) == []
