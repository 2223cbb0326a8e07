"""The store of groups: one checked file for each, named by its key, and a thread that reads ahead.

    <folder>/3f...c2.safetensors     a group's tensors
    <folder>/manifest.jsonl          {"key": "3f...c2", "bytes": 4718592} a line; 0 bytes: deleted

A file gets its name only when it is whole. The manifest is the record of how large each was; lines that are torn or
lost, or the whole manifest, are made again from the files when the store is opened.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from blockskip.errors import RunError
from blockskip.store.ahead import read_ahead
from blockskip.store.behind import write_behind
from blockskip.store.files import DISK_FULL, remove_stale_temporaries, write_atomically
from blockskip.store.tensors import DamagedFile, check_header, read_tensors, write_tensors

_KEY = re.compile(r"[0-9a-f]{1,64}")


class StoreError(RunError):
    """A stored group is missing or damaged; ``GroupStore.discard`` its ``key`` and it is computed anew.

    Args:
        path: the group's file.
        key: its key.
        reason: what is wrong with it.
    """

    def __init__(self, path: Path, key: str, reason: str) -> None:
        self.path, self.key = path, key
        super().__init__(
            f'The stored group "{path}" cannot be used: {reason}; run the command again and it is computed anew.'
        )


class GroupStore:
    """Groups of named tensors in a folder. Keys are lower-case hex (``keys.key``).

    Several readers may use a folder at once; of several writers of one key the last one counts.

    Args:
        folder: made when it does not exist; what killed processes left half-written is removed.

    Raises:
        RunError: the folder cannot be made or read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._recording = threading.Lock()
        self._manifest = folder / "manifest.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            remove_stale_temporaries(folder)
            self._bytes = self._open()
        except OSError as error:
            raise RunError(
                f'The folder "{folder}" cannot be used as a store: {error.strerror}; choose another one.'
            ) from None

    def write(self, key: str, tensors: Mapping[str, torch.Tensor], about: str = "") -> int:
        """Store a group, replacing what had its key; returns the bytes of its file.

        Args:
            key: the hash of everything that the tensors were made from.
            tensors: of any device; see ``write_tensors`` for dtypes.
            about: a remark for people, kept in the file.

        Raises:
            RunError: the disk is full, or the file cannot be written; nothing half-written is left.
            ValueError: the key is not hex, or a tensor cannot be stored.
        """
        path = self.path(key)
        needed = sum(tensor.nbytes for tensor in tensors.values())
        try:
            write_atomically(path, lambda temporary: write_tensors(temporary, tensors, {"key": key, "about": about}))
            size = path.stat().st_size
        except OSError as error:
            raise RunError(self._not_written(error, needed)) from None
        self._record({key: size})
        return size

    def has(self, key: str) -> bool:
        """Whether a group is there, with the size that was written; its bytes are checked by ``read``."""
        path, expected = self.path(key), self._bytes.get(key)
        try:
            return expected is not None and path.stat().st_size == expected
        except OSError:
            return False

    def read(self, key: str, into: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """A group's tensors on the CPU, copied from its file and checked.

        Args:
            key: of a stored group.
            into: tensors of an earlier read that may be overwritten; those of equal name, dtype and shape are reused.

        Raises:
            StoreError: the file is missing, damaged, or another group's.
        """
        path = self.path(key)
        try:
            tensors, metadata = read_tensors(path, into)
        except FileNotFoundError:
            raise StoreError(path, key, "it does not exist") from None
        except OSError as error:
            raise StoreError(path, key, f"it cannot be read ({error.strerror})") from None
        except DamagedFile as error:
            raise StoreError(path, key, str(error)) from None
        if metadata.get("key") != key:
            raise StoreError(path, key, f"it is the file of {metadata.get('key')}")
        return tensors

    def read_ahead(self, keys: Sequence[str], depth: int = 2) -> Generator[dict[str, torch.Tensor], None, None]:
        """The groups of the keys in their order, read by a thread up to ``depth`` groups before they are asked for.

        At most ``depth + 1`` sets of buffers are used, over and over: **what is yielded is valid until the next one is
        asked for**; copy what must live longer. Closing the iterator ends the thread.

        Raises:
            StoreError: at the group that cannot be read, as ``read``.
            ValueError: depth is below 1.
        """
        if depth < 1:
            raise ValueError(f"depth must be at least 1, not {depth}")
        return read_ahead(self.read, list(keys), depth)

    def write_behind(self) -> contextlib.AbstractContextManager[Callable[[str, dict[str, torch.Tensor]], None]]:
        """A function that stores a group as ``write`` does, by threads; all groups are stored when the context ends.

        The tensors must not be changed meanwhile. What goes wrong is raised by a later call or at the end.
        """
        return write_behind(self.write)

    def size(self) -> int:
        """Bytes of all groups."""
        return sum(self._bytes.values())

    def delete(self, keys: Iterable[str]) -> None:
        """Remove groups; those that are not there are passed over.

        Raises:
            RunError: a file cannot be removed.
        """
        removed: dict[str, int] = {}
        try:
            for key in keys:
                self.path(key).unlink(missing_ok=True)
                removed |= {key: 0} if key in self._bytes else {}
        except OSError as error:
            raise RunError(f'A group in "{self._folder}" cannot be deleted: {error.strerror}.') from None
        finally:
            self._record(removed)

    def discard(self, key: str) -> None:
        """Remove one group, damaged or not, so that it can be written anew."""
        self.delete([key])

    def path(self, key: str) -> Path:
        """The file of a key.

        Raises:
            ValueError: the key is not lower-case hex.
        """
        if not _KEY.fullmatch(key):
            raise ValueError(f"a key is lower-case hex, not {key!r}")
        return self._folder / f"{key}.safetensors"

    def _open(self) -> dict[str, int]:
        """The bytes of every whole group: from the manifest where it agrees with the files, else from the files."""
        recorded, clean = self._read_manifest()
        sizes = {}
        for path in self._folder.glob("*.safetensors"):
            with contextlib.suppress(FileNotFoundError):  # another process may be deleting
                key, size = path.stem, path.stat().st_size
                if _KEY.fullmatch(key) and (recorded.get(key) == size or _is_whole(path, key)):
                    sizes[key] = size
        if not clean or sizes != {key: size for key, size in recorded.items() if size}:
            text = "".join(_line(key, size) for key, size in sorted(sizes.items()))
            with contextlib.suppress(OSError):  # it is only a record
                write_atomically(self._manifest, lambda path: path.write_text(text, "ascii", newline="\n"))
        return sizes

    def _read_manifest(self) -> tuple[dict[str, int], bool]:
        """The last size of each key, and whether every line was whole."""
        recorded, clean = {}, True
        try:
            lines = self._manifest.read_bytes().split(b"\n")
        except FileNotFoundError:
            return {}, True
        for line in lines[:-1]:
            try:
                entry = json.loads(line)
                recorded[str(entry["key"])] = int(entry["bytes"])
            except (ValueError, KeyError, TypeError):
                clean = False
        return recorded, clean and not lines[-1]

    def _record(self, sizes: Mapping[str, int]) -> None:
        """Note new sizes; 0 is a deleted group. What cannot be noted is found again when the store is opened."""
        for key, size in sizes.items():
            if size:
                self._bytes[key] = size
            else:
                self._bytes.pop(key, None)
        with self._recording, contextlib.suppress(OSError), self._manifest.open("ab") as stream:
            stream.write("".join(_line(key, size) for key, size in sizes.items()).encode())

    def _not_written(self, error: OSError, needed: int) -> str:
        if error.errno in DISK_FULL:
            return (
                f'The disk of the folder "{self._folder}" is full: the next group needs {needed:,} bytes; '
                "free some space, or choose another folder with features.cache."
            )
        return f'A group cannot be written to the folder "{self._folder}": {error.strerror}; choose another folder.'


def _is_whole(path: Path, key: str) -> bool:
    try:
        return check_header(path).get("key") == key
    except (OSError, DamagedFile):
        return False


def _line(key: str, size: int) -> str:
    return json.dumps({"key": key, "bytes": size}) + "\n"
