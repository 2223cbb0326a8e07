"""Tensors that wait for their turn in files, which live as long as the wait.

    <folder>/.waiting.4711-9f...3c.tmp/0-state      what call 0 left under the name "state"

Blocks run one at a time over many groups, and whatever a group needs later waits meanwhile. On disk that takes the
memory of one group instead of a window's, for a write and a read in every block.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from blockskip.errors import RunError
from blockskip.store.files import DISK_FULL, remove_stale_temporaries


class OnDisk:
    """``waiting.Waiting`` in files, a file a tree; values other than tensors stay in memory. Made by ``on_disk``.

    Args:
        folder: of the files, which is there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._trees: dict[tuple[int, str], tuple[list[Any], pytree.TreeSpec]] = {}
        self._sizes: dict[tuple[int, str], int] = {}
        #: The largest that all files together have been, in bytes.
        self.peak_bytes = 0

    def put(self, call: int, name: str, tree: Any) -> None:
        """Write a tree's tensors.

        Raises:
            RunError: the disk is full, or the file cannot be written.
        """
        leaves, spec = pytree.tree_flatten(tree)
        tensors = [_own(value) for value in leaves if isinstance(value, torch.Tensor)]
        path = self._path(call, name)
        try:
            with path.open("wb") as stream:
                torch.save(tensors, stream)
            self._sizes[call, name] = path.stat().st_size
        except (OSError, RuntimeError) as error:
            cause = error if isinstance(error, OSError) else error.__context__
            full = isinstance(cause, OSError) and cause.errno in DISK_FULL
            raise RunError(
                f'The states of a window cannot be written to "{self._folder.parent}" '
                f"({'its disk is full' if full else error}); free some space, choose another folder with "
                'features.cache, or take a smaller features.window or features.window_on = "memory".'
            ) from error
        self._trees[call, name] = [_TENSOR if isinstance(value, torch.Tensor) else value for value in leaves], spec
        self.peak_bytes = max(self.peak_bytes, sum(self._sizes.values()))

    def get(self, call: int, name: str) -> Any:
        """The tree, its tensors read into new memory on the CPU."""
        if (call, name) not in self._trees:
            return None
        leaves, spec = self._trees[call, name]
        with self._path(call, name).open("rb") as stream:
            tensors = iter(torch.load(stream, weights_only=True))
        return pytree.tree_unflatten([next(tensors) if value is _TENSOR else value for value in leaves], spec)

    def take(self, call: int, name: str) -> Any:
        """The tree; its file is removed."""
        tree = self.get(call, name)
        if self._trees.pop((call, name), None) is not None:
            del self._sizes[call, name]
            self._path(call, name).unlink()
        return tree

    def _path(self, call: int, name: str) -> Path:
        return self._folder / f"{call}-{name.replace(' ', '-')}"


@contextlib.contextmanager
def on_disk(folder: Path) -> Iterator[OnDisk]:
    """A place to wait in a new folder inside ``folder``, removed in the end; what killed processes left is removed.

    Raises:
        RunError: it cannot be made.
    """
    own = folder / f".waiting.{os.getpid()}-{uuid.uuid4().hex}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_stale_temporaries(folder)
        own.mkdir()
    except OSError as error:
        raise RunError(f'The folder "{folder}" cannot be used for waiting states: {error.strerror}.') from None
    try:
        with (own / "open").open("wb"):  # for Windows, where an open file tells other processes that this one lives
            yield OnDisk(own)
    finally:
        shutil.rmtree(own, ignore_errors=True)


_TENSOR = object()


def _own(value: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU with memory of its own, since a file holds the whole memory that a tensor looks at."""
    value = value.detach().cpu().contiguous()
    return value if value.untyped_storage().nbytes() == value.nbytes else value.clone()
