"""A safetensors file in which every byte is checked when it is read back.

    8 bytes: length of the header | header: JSON, padded with spaces to a multiple of 8 | the tensors' bytes

The header's ``__metadata__`` holds the sha256 of every tensor's bytes and of the header itself, so that a change in a
name, a shape or a dtype is found as well. Reading copies into memory of our own, into buffers of an earlier read where
they fit; nothing is mapped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any, cast

import torch

_DTYPES = {
    "F64": torch.float64,
    "I64": torch.int64,
    "F32": torch.float32,
    "I32": torch.int32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I16": torch.int16,
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LARGEST_HEADER = 100_000_000  # the limit of the safetensors library


class DamagedFile(Exception):
    """A file is not what was written; the message is the reason."""


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors of any device and layout to a file, with checksums.

    Args:
        path: the file; replaced when it exists.
        tensors: by name; float64/32/16, bfloat16, int64/32/16/8, uint8 or bool.
        metadata: kept in the header.

    Raises:
        ValueError: a dtype or a name that the format does not have.
        OSError: the file cannot be written.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES or name == "__metadata__":
            raise ValueError(f'a tensor "{name}" of {tensor.dtype} cannot be stored')
    # Wide dtypes first, as the safetensors library does it, so that every tensor is aligned.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    contents = {name: tensors[name].detach().cpu().contiguous() for name in order}
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in contents.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        header["__metadata__"][f"sha256 {name}"] = hashlib.sha256(_bytes(tensor)).hexdigest()
    header["__metadata__"]["sha256"] = _checksum(header)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor in contents.values():
            stream.write(_bytes(tensor))


def read_tensors(
    path: Path, into: Mapping[str, torch.Tensor] | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of a file and its metadata (without the checksums), every byte checked.

    Args:
        path: a file of ``write_tensors``.
        into: tensors to read into; one that has the name, dtype and shape of a stored tensor, and is contiguous on the
            CPU, is overwritten and returned in its place (overwritten even when the file proves to be damaged).

    Raises:
        DamagedFile: the file is not what was written.
        OSError: the file is missing or cannot be read.
    """
    with path.open("rb") as stream:
        header, metadata = _read_header(path, stream)
        tensors = {}
        for name, entry in header.items():
            tensor = _room_for(_DTYPES[entry["dtype"]], tuple(entry["shape"]), (into or {}).get(name))
            if stream.readinto(_bytes(tensor)) != tensor.nbytes:
                raise DamagedFile("it is shorter than its header says")
            if hashlib.sha256(_bytes(tensor)).hexdigest() != metadata[f"sha256 {name}"]:
                raise DamagedFile(f'the bytes of "{name}" are not those that were written')
            tensors[name] = tensor
    return tensors, {name: text for name, text in metadata.items() if name.partition(" ")[0] != "sha256"}


def check_header(path: Path) -> dict[str, str]:
    """The metadata of a file whose header and length are whole; the tensors' bytes are not read.

    Raises:
        DamagedFile, OSError: as ``read_tensors``.
    """
    with path.open("rb") as stream:
        return _read_header(path, stream)[1]


def _read_header(path: Path, stream: BufferedReader) -> tuple[dict[str, Any], dict[str, str]]:
    """The entries of the tensors in the order of their bytes, and the metadata; the stream stands at the first byte."""
    size = path.stat().st_size
    if size == 0:
        raise DamagedFile("it is empty")
    length = int.from_bytes(stream.read(8), "little")
    if size < 8 or length > min(size - 8, _LARGEST_HEADER):
        raise DamagedFile("it has no whole safetensors header")
    try:
        header = json.loads(stream.read(length))
        metadata = header["__metadata__"]
        expected = metadata.pop("sha256")
        names = [name.partition(" ")[2] for name in metadata if name.startswith("sha256 ")]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DamagedFile("its header is not one that was written here") from None
    if lost := [name for name in names if name not in header]:
        raise DamagedFile(f'the tensor "{lost[0]}" is missing')
    if _checksum(header) != expected:
        raise DamagedFile("its header is not the one that was written")
    del header["__metadata__"]
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size != 8 + length + end:
        raise DamagedFile(f"it has {size} bytes instead of {8 + length + end}")
    return header, metadata


def _room_for(dtype: torch.dtype, shape: tuple[int, ...], buffer: torch.Tensor | None) -> torch.Tensor:
    if (
        buffer is not None
        and (buffer.dtype, tuple(buffer.shape)) == (dtype, shape)
        and buffer.device.type == "cpu"
        and buffer.is_contiguous()
        and not buffer.requires_grad
    ):
        return buffer
    return torch.empty(shape, dtype=dtype)


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return memoryview(cast(Any, tensor.reshape(prod(tensor.shape)).view(torch.uint8).numpy()))


def _checksum(header: Mapping[str, Any]) -> str:
    """sha256 of a header in canonical form, without its own checksum."""
    metadata = {name: text for name, text in header["__metadata__"].items() if name != "sha256"}
    text = json.dumps({**header, "__metadata__": metadata}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
