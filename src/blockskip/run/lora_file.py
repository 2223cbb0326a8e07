"""LoRA files of which the same run writes the same bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from blockskip.store.files import write_atomically


def write_sorted(path: Path, write: Callable[[Path], object]) -> None:
    """``write_atomically`` for a safetensors file whose texts in the header are then put in order.

    The safetensors library writes them in an order that differs from time to time.
    """

    def write_and_sort(temporary: Path) -> None:
        write(temporary)
        sort_header(temporary)

    write_atomically(path, write_and_sort)


def sort_header(path: Path) -> None:
    """Sort the texts in the header of a safetensors file, in place; the tensors stay where they are."""
    with path.open("r+b") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
        header["__metadata__"] = dict(sorted(header.get("__metadata__", {}).items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        if len(text) > length:
            raise ValueError(f'the header of "{path}" does not fit in its place')
        stream.seek(8)
        stream.write(text.ljust(length))
