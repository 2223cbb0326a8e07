"""Names for stored results: the hash of everything that their kernel takes; and what files of ours say they are."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

#: Raised by one when a phase's stored format or arithmetic changes, so that nothing stale can be read.
FORMATS = {
    "transformer": 1, "text": 1, "pixels": 1, "features": 1, "checkpoint": 1, "preview": 1, "selection": 1,
    "benchmark": 1,
}  # fmt: skip
#: The entry of an adapter file's header that says what it is, where it is no LoRA, and its value.
KIND, DIFFERENCE = "blockskip.kind", "weights_difference"


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"type": type(value).__name__, **fields}
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in sorted(value.items())}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value.hex()
    if value is None or isinstance(value, (str, int, bool)):
        return value
    raise TypeError(f"a key is made of plain values, not {type(value).__name__}")


def key(phase: str, argument: Any) -> str:
    """The 32-digit hash of a frozen dataclass, of its type names, and of the phase's format number.

    Args:
        phase: a name in ``FORMATS``.
        argument: a dataclass of plain values (nested dataclasses, tuples, dicts). Floats count by their exact bits.

    Raises:
        TypeError: a value has no canonical form (a path, a tensor): put its content's hash there instead.
    """
    document = json.dumps([phase, FORMATS[phase], _plain(argument)], sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(document.encode()).hexdigest()[:32]


def file_sha256(path: Path) -> str:
    """The sha256 of a file's bytes, read in pieces of 4 MiB."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while piece := stream.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()
