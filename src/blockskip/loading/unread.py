"""Tensors of a file that are known by shape and dtype and read when they are asked for, one at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "BOOL": torch.bool,
}  # fmt: skip


class Unread(torch.Tensor):
    """A tensor on the meta device that knows how its values are had.

    What torch computes with it is again one: a function that takes tensors apart and joins them anew runs on a whole
    checkpoint in no memory, and then each of its results is read alone. Functions that change a tensor are not for it.
    """

    _make: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype, make: Callable[[], torch.Tensor]) -> Unread:
        """A tensor of a shape and dtype that ``make`` gives."""
        found: Unread = torch.empty(tuple(shape), dtype=dtype, device="meta").as_subclass(cls)
        found._make = make
        return found

    def read(self) -> torch.Tensor:
        """The values, on the CPU; they may be a view of the mapped file."""
        return self._make()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.split, torch.Tensor.split) and isinstance(args[1], Sequence):
            dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
            args = (args[0], _in_proportion(args[1], args[0].shape[dim]), *args[2:])
        result = super().__torch_function__(func, types, args, kwargs)

        def made(part: int | None = None) -> torch.Tensor:
            values = func(*_read(args), **_read(kwargs))
            return values if part is None else values[part]  # type: ignore[no-any-return]

        if isinstance(result, Unread):
            if not hasattr(result, "_make"):  # else it is the argument itself
                result._make = made
        elif isinstance(result, (tuple, list)):
            for number, part in enumerate(result):
                if isinstance(part, Unread):
                    part._make = functools.partial(made, number)
        return result


def _read(value: Any) -> Any:
    if isinstance(value, Unread):
        return value.read()
    if isinstance(value, dict):
        return {name: _read(item) for name, item in value.items()}
    return type(value)(map(_read, value)) if type(value) in (list, tuple) else value


def _in_proportion(sizes: Sequence[int], length: int) -> Sequence[int]:
    """Sizes of parts that add up to a length: converters have those of the published width written into them."""
    total = sum(sizes)
    if total in (0, length) or any(size * length % total for size in sizes):
        return sizes
    return [size * length // total for size in sizes]


def unread_tensors(path: Path) -> dict[str, Unread]:
    """Every tensor of a safetensors file, or of a file that ``torch.save`` wrote, by name.

    Raises:
        Exception: whatever the file's library has to say of a file that cannot be read.
    """
    if is_zipped(path):
        found = {
            name: Unread.of(value.shape, value.dtype, functools.partial(_from_pickle, path, name))
            for name, value in _pickled(path).items()
        }
        forget_mapped()
        return found
    found = {}
    with safe_open(path, framework="pt") as stored:
        for name in stored.keys():  # noqa: SIM118
            part = stored.get_slice(name)
            dtype = _DTYPES.get(part.get_dtype(), torch.uint8)
            found[name] = Unread.of(part.get_shape(), dtype, functools.partial(_from_safetensors, path, name))
    return found


def is_zipped(path: Path) -> bool:
    """Whether a file is one of ``torch.save``."""
    with path.open("rb") as stream:
        return stream.read(2) == b"PK"


def forget_mapped() -> None:
    """Let go of the file of ``torch.save`` that is mapped since its first tensor was read."""
    _pickled.cache_clear()


def _from_safetensors(path: Path, name: str) -> torch.Tensor:
    with safe_open(path, framework="pt") as stored:  # a mapping for each tensor, that ends with it
        return stored.get_tensor(name)  # type: ignore[no-any-return]


def _from_pickle(path: Path, name: str) -> torch.Tensor:
    return _pickled(path)[name].detach()


@functools.lru_cache(1)
def _pickled(path: Path) -> dict[str, torch.Tensor]:
    stored = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    if not isinstance(stored, dict):
        raise ValueError("it holds no table of tensors")
    while isinstance(stored.get("state_dict"), dict):
        stored = stored["state_dict"]
    return {name: value for name, value in stored.items() if isinstance(value, torch.Tensor)}
