"""One process at a time: a lock file, and beside it the id of the process that holds it.

The system lets go of a lock when its process ends, however it ends, so none has ever to be removed by hand. The id
stands in a file of its own, since Windows lets nobody read a locked one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout


class Locked(Exception):
    """Another process holds a lock.

    Args:
        holder: it, in words.
    """

    def __init__(self, holder: str) -> None:
        super().__init__(holder)
        self.holder = holder


@contextlib.contextmanager
def locked(file: Path, waiting: Callable[[str], object] | None = None) -> Iterator[bool]:
    """Hold a lock file, which is gone afterwards; False, and nothing held, where the file system has no locks.

    Args:
        file: in a folder that is there.
        waiting: is told who holds it, and then it is waited for.

    Raises:
        Locked: another process holds it, and nobody waits.
    """
    lock, note = FileLock(file), file.with_suffix(".pid")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if waiting is None:
            raise Locked(_holder(note)) from None
        waiting(_holder(note))
        lock.acquire()
    except (OSError, NotImplementedError):
        pass
    if not lock.is_locked:
        yield False
        return
    try:
        with contextlib.suppress(OSError):
            note.write_text(str(os.getpid()), encoding="ascii")
        yield True
    finally:
        for path in (note, file):  # the lock last, while it is held; Windows lets it go first, and removes it then
            with contextlib.suppress(OSError):
                path.unlink()
        lock.release()


def _holder(note: Path) -> str:
    try:
        return f"process {int(note.read_text(encoding='ascii'))}"
    except (OSError, ValueError):  # it has just begun, or just ended
        return "another process"
