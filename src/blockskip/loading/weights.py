"""The tensors of a part of a model, read by name from its safetensors files, and the identity of those files."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from blockskip.errors import UserError
from blockskip.keys import file_sha256
from blockskip.progress import say

#: What diffusers and transformers call a part's weights; variants (``.fp16.``) are left aside, as they do.
NAMES = ("diffusion_pytorch_model.safetensors", "model.safetensors")


class Weights:
    """The tensors in a folder's safetensors files, one file or shards with an index.

    Raises:
        UserError: the folder has no safetensors file, or one is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        indexed = [folder / f"{name}.index.json" for name in NAMES if (folder / f"{name}.index.json").is_file()]
        if indexed:
            names = json.loads(indexed[0].read_text(encoding="utf-8"))["weight_map"]
            self.files = {name: folder / file for name, file in names.items()}
        else:
            self.files = {}
            plain = [folder / name for name in NAMES if (folder / name).is_file()]
            for file in plain[:1]:
                with _open(file) as tensors:
                    self.files = dict.fromkeys(tensors.keys(), file)
        if not self.files:
            raise UserError(f'"{folder}" holds no safetensors weights; fetch or convert the model to that format.')

    def under(self, prefix: str) -> list[str]:
        """Names of the tensors below a module's full name."""
        return [name for name in self.files if name.startswith(prefix + ".")]

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Tensors by name, on the CPU, as stored; they may be views of the mapped file."""
        found: dict[str, torch.Tensor] = {}
        for file, keys in self._by_file(names).items():
            with _open(file) as tensors:
                found |= {key: tensors.get_tensor(key) for key in keys}
        return found

    def _by_file(self, names: Iterable[str]) -> dict[Path, list[str]]:
        wanted: dict[Path, list[str]] = {}
        for name in names:
            wanted.setdefault(self.files[name], []).append(name)
        return wanted

    def inside(self, prefix: str, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
        """The tensors below a module's full name, by their names inside it, on a device; floating ones in ``dtype``."""
        tensors = self.named(self.under(prefix), dtype, device)
        return {name[len(prefix) + 1 :]: value for name, value in tensors.items()}

    def named(self, names: Iterable[str], dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
        """Tensors by name on a device, floating ones in ``dtype``.

        One file at a time, and only what is named: where the page cache has large pages, tensors that are merely asked
        for bring hundreds of megabytes into the process.

        Raises:
            UserError: one is missing.
        """
        names = list(names)
        if absent := [name for name in names if name not in self.files]:
            raise UserError(f'"{self.folder}" lacks the tensor "{absent[0]}"; fetch the model again.')
        found: dict[str, torch.Tensor] = {}
        for keys in self._by_file(names).values():
            found |= {
                name: value.to(device, dtype if value.is_floating_point() else value.dtype)
                for name, value in self.read(keys).items()
            }
        return found

    def places(self, names: Iterable[str]) -> dict[Path, list[tuple[int, int]]]:
        """Where tensors lie in their files: (first byte, byte behind the last), in the files' order."""
        return {file: sorted(_offsets(file)[key] for key in keys) for file, keys in self._by_file(names).items()}

    def identity(self) -> str:
        """The hash of all files' contents and of the config: what a store's key says of this part of the model."""
        digests = [file_identity(file) for file in sorted(set(self.files.values()))]
        config = self.folder / "config.json"
        digests.append(file_sha256(config) if config.is_file() else "")
        return hashlib.sha256("".join(digests).encode()).hexdigest()


def _open(file: Path):  # type: ignore[no-untyped-def]
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f'The weights file "{file}" cannot be read ({error}); fetch it again.') from None


@functools.lru_cache
def _offsets(file: Path) -> dict[str, tuple[int, int]]:
    """The bytes of each tensor of a safetensors file, from its header."""
    with file.open("rb") as stream:
        start = 8 + (length := int.from_bytes(stream.read(8), "little"))
        header = json.loads(stream.read(length))
    spans = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    return {name: (start + begin, start + end) for name, (begin, end) in spans.items()}


def files_identity(folder: Path) -> str:
    """The hash of all files of a part without weights, a tokenizer or a scheduler: of their names and contents."""
    files = [(file.name, file_sha256(file)) for file in sorted(folder.glob("*")) if file.is_file()]
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()


def file_identity(file: Path) -> str:
    """The sha256 of a weights file: the hub's own hash, else computed once and remembered by path, size and time."""
    resolved = file.resolve()
    if len(resolved.name) == 64 and set(resolved.name) <= set("0123456789abcdef"):
        return resolved.name
    status = resolved.stat()
    entry = f"{resolved}|{status.st_size}|{status.st_mtime_ns}"
    known = _known()
    if entry not in known:
        if status.st_size > 2**31:
            say(f"Reading {resolved.name} once, to know it again ({status.st_size / 2**30:.0f} GiB).")
        known[entry] = file_sha256(resolved)
        _remember(known)
    return str(known[entry])


def remember_identity(file: Path, digest: str) -> None:
    """Spare ``file_identity`` the reading of a file that was just written and hashed."""
    resolved, status = file.resolve(), file.stat()
    _remember(_known() | {f"{resolved}|{status.st_size}|{status.st_mtime_ns}": digest})


def _known() -> dict[str, str]:
    try:
        known = json.loads(_memory_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _remember(known: dict[str, str]) -> None:
    memory = _memory_file()
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        temporary = memory.with_name(f"{memory.name}.{os.getpid()}")
        temporary.write_text(json.dumps(known, indent=1), encoding="utf-8")
        temporary.replace(memory)
    except OSError:
        pass  # a read-only home costs the next run some hashing, nothing else


def cache_folder() -> Path:
    """Where the package keeps what it need not make again, for all runs: ``BLOCKSKIP_CACHE``, else in the home."""
    if own := os.environ.get("BLOCKSKIP_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "blockskip"


def _memory_file() -> Path:
    return cache_folder() / "weights.json"
