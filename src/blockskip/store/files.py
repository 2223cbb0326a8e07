"""Files that are whole or absent, whenever the process or the machine stops."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

#: What a full disk says; a second attempt would meet the same.
DISK_FULL = frozenset({errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)})

_TEMPORARY = re.compile(r"\..+\.(\d+)-[0-9a-f]{32}\.tmp")


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Make a file, or replace it, in one step: readers see the old one, or the new one as a whole.

    ``write`` gets a temporary path in the same folder. The file it makes there is flushed to the disk and renamed, and
    the folder is flushed where the system allows it. Whatever goes wrong, the temporary file is removed and the old
    file stays. An OSError other than a full disk is met with one second attempt.

    Args:
        path: the file to make; its folder exists.
        write: makes the file at the path it is given; may be called twice.

    Raises:
        OSError: the file could not be written.
        Exception: whatever ``write`` raises.
    """
    try:
        _attempt(path, write)
    except OSError as error:
        if error.errno in DISK_FULL:
            raise
        _attempt(path, write)


def remove_stale_temporaries(folder: Path) -> None:
    """Remove what ``write_atomically`` and ``on_disk`` left in a folder when their process was killed.

    What belongs to processes that still run is left alone (on Windows: files that are still open).
    """
    for path in folder.iterdir():
        match = _TEMPORARY.fullmatch(path.name)
        if match and not _runs(int(match[1])):
            with contextlib.suppress(OSError):
                if path.is_dir():  # under another name first: Windows refuses that while a file inside is open
                    path = path.rename(path.with_name(f".{match[1]}.{os.getpid()}-{uuid.uuid4().hex}.tmp"))
                    shutil.rmtree(path)
                else:
                    path.unlink()


def _attempt(path: Path, write: Callable[[Path], object]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex}.tmp")
    try:
        write(temporary)
        with temporary.open("rb+") as stream:
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    _flush_folder(path.parent)


def _flush_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # Windows opens no folders, some file systems do not flush them
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _runs(process: int) -> bool:
    """Whether a process of this number is alive; on Windows always False, since asking there would end it."""
    if os.name == "nt":
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True
