"""The package's own folders with a transformer from a single file: a link to it, or its tensors in diffusers' layout.

    <cache>/transformers/<key>/            config.json, index and shards: whole
    <cache>/transformers/<key>.half/       shards that are whole, of a conversion that runs or was stopped
    <cache>/transformers/<key>.<id>.part   the shard that a process is writing
    <cache>/transformers/<key>.lock        held by the process that converts

A folder gets its name when it is whole. Shards get theirs so too, so that a conversion goes on where it was stopped.
A second process that wants the same file converted waits for the first. Where the file system has no locks both convert
it, which does no harm: they write the same bytes, each in a part of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import diffusers
import torch

from blockskip.errors import UserError
from blockskip.keys import file_sha256, key
from blockskip.loading.unread import Unread, forget_mapped
from blockskip.loading.weights import NAMES, cache_folder, file_identity, remember_identity
from blockskip.locks import locked
from blockskip.progress import progress, say
from blockskip.units import size as in_units

#: Bytes of a shard, at most, but for a tensor that is larger.
SHARD = 2 << 30
#: Dtypes as safetensors calls them, in the order in which it writes their tensors.
_TYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
INDEX = f"{NAMES[0]}.index.json"


@dataclass(frozen=True)
class FolderArgument:
    """Everything that a folder is made from.

    Args:
        file: identity of the file.
        config: hash of the transformer's config.
        made_by: how: the path that is linked to, or the class and the converter's version.
    """

    file: str
    config: str
    made_by: tuple[str, ...]


def linked_folder(file: Path, config: Path) -> Path | None:
    """The folder in which a file that needs no conversion is linked to; None: the system makes no links there."""
    folder = _place(file, config, "link", str(file))
    if not (folder / "config.json").is_file():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                (folder / NAMES[0]).symlink_to(file)
            _copy(config, folder)
        except (OSError, NotImplementedError):
            with contextlib.suppress(OSError):
                folder.rmdir()
            return None
    return folder


def converted_folder(file: Path, config: Path, class_name: str, tensors: Mapping[str, Unread]) -> Path:
    """The folder with a file's tensors in diffusers' layout, written by the first call for a file.

    Args:
        tensors: by diffusers' names.

    Raises:
        UserError: there is no room for them, or the cache cannot be written.
    """
    folder = _place(file, config, class_name, diffusers.__version__)
    if not (folder / "config.json").is_file():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with locked(_beside(folder, "lock"), partial(_wait, file)) as alone:
                if alone:
                    for left in folder.parent.glob(f"{folder.name}.*.part"):  # of conversions that were stopped
                        left.unlink()
                if not (folder / "config.json").is_file():  # else it was made meanwhile
                    _convert(file, config, tensors, folder)
        except OSError as error:
            if not (folder / "config.json").is_file():  # else another process was quicker
                raise UserError(
                    f'"{file}" cannot be converted in "{folder.parent}" ({error.strerror or error}); set the '
                    "environment variable BLOCKSKIP_CACHE to a folder with room for it."
                ) from None
    return folder


def _place(file: Path, config: Path, *made_by: str) -> Path:
    argument = FolderArgument(file_identity(file), file_sha256(config), made_by)
    return cache_folder() / "transformers" / key("transformer", argument)


def _wait(file: Path, holder: str) -> None:
    say(f"Waiting for {holder}, which converts {file.name}.")


def _beside(folder: Path, ending: str) -> Path:
    return folder.with_name(f"{folder.name}.{ending}")


def _convert(file: Path, config: Path, tensors: Mapping[str, Unread], folder: Path) -> None:
    shards, half, part = _shards(tensors), _beside(folder, "half"), _beside(folder, f"{os.getpid()}.part")
    half.mkdir(exist_ok=True)
    files = [half / NAMES[0].replace(".", f"-{n:05d}-of-{len(shards):05d}.", 1) for n in range(1, len(shards) + 1)]
    sizes = [sum(tensors[name].numel() * tensors[name].element_size() for name in names) for names in shards]
    needed = sum(size for path, size in zip(files, sizes, strict=True) if not path.is_file())
    free = shutil.disk_usage(half).free
    if needed > free:
        raise UserError(
            f'"{file}" is converted to diffusers\' layout in "{folder.parent}", which takes {in_units(needed)}, and '
            f"{in_units(free)} are free: set the environment variable BLOCKSKIP_CACHE to a folder on a larger disk."
        )
    say(
        f"Converting {file.name} to diffusers' layout, once: {in_units(sum(sizes))} in {folder}, which you can remove "
        "when you no longer use it."
    )
    digests = {}
    with progress(len(shards), "converting") as shown:
        for path, names in zip(files, shards, strict=True):
            if not path.is_file():
                digests[path.name] = _write(path, part, {name: tensors[name] for name in names})
            shown.advance()
    places = {name: path.name for path, names in zip(files, shards, strict=True) for name in names}
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": places}
    (half / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    _copy(config, half)
    half.replace(folder)
    for name, digest in digests.items():
        remember_identity(folder / name, digest)


def _shards(tensors: Mapping[str, Unread]) -> list[list[str]]:
    """The names of the tensors of each file."""
    found: list[list[str]] = [[]]
    size = 0
    for name, value in tensors.items():
        own = value.numel() * value.element_size()
        if found[-1] and size + own > SHARD:
            found.append([])
            size = 0
        found[-1].append(name)
        size += own
    return found


def _write(path: Path, temporary: Path, tensors: Mapping[str, Unread]) -> str:
    """Write a safetensors file with one tensor in memory at a time, under another name first; return its sha256.

    Its bytes are those that ``safetensors.torch.save_file`` writes, so that the same tensors are the same file: where a
    tensor begins in a mapped file decides the last bit of what a CPU computes with it.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end, ordered = 0, sorted(tensors.items(), key=lambda item: (list(_TYPES).index(item[1].dtype), item[0]))
    for name, value in ordered:
        begin, end = end, end + value.numel() * value.element_size()
        header[name] = {"dtype": _TYPES[value.dtype], "shape": list(value.shape), "data_offsets": [begin, end]}
    head = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    digest = hashlib.sha256()
    try:
        with temporary.open("wb") as stream:
            for piece in (len(head).to_bytes(8, "little"), head):
                stream.write(piece)
                digest.update(piece)
            for _, value in ordered:
                data = value.read().contiguous().reshape(-1).view(torch.uint8).numpy()
                stream.write(data)
                digest.update(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        forget_mapped()
        with contextlib.suppress(OSError):
            temporary.unlink()
    return digest.hexdigest()


def _copy(config: Path, folder: Path) -> None:
    """Copy the config, the last file of a folder, in one step."""
    temporary = folder / f"config.json.{os.getpid()}"
    temporary.write_bytes(config.read_bytes())
    temporary.replace(folder / "config.json")
