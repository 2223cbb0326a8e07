"""Distances as they are measured, kept line by line, so that an interrupted selection goes on where it was."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from blockskip.store.files import write_atomically


class Table:
    """Entries by key in a file of JSON lines; each is on disk as soon as it is added.

    Args:
        path: the file; a last line that was cut off by a kill is left out.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries: dict[str, Any] = {}
        whole = ""
        if path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            for line in text.splitlines():
                try:
                    document = json.loads(line)
                    self._entries[document["key"]] = document["value"]
                except (ValueError, KeyError, TypeError):
                    continue
                whole += line + "\n"
            if text != whole:
                write_atomically(path, lambda temporary: temporary.write_text(whole, encoding="utf-8"))

    def get(self, key: str) -> Any | None:
        """What was added under a key (``keys.key``), or None."""
        return self._entries.get(key)

    def numbers(self, key: str, shape: tuple[int, ...]) -> list[Any] | None:
        """Numbers of a shape that were added under a key, or None: also where a damaged file holds something else."""
        found = self.get(key)
        try:
            values = np.asarray(found, dtype=np.float64)
        except (ValueError, TypeError):
            return None
        return found if values.shape == shape and bool(np.isfinite(values).all()) else None

    def add(self, key: str, value: Any) -> None:
        """Keep a value of numbers, texts, lists and dicts."""
        self._entries[key] = value
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"key": key, "value": value}) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
