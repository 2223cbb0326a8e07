"""The one place that decides in which dtype things are computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from blockskip.errors import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str, key: str = "train.device") -> torch.device:
    """The device a name stands for; ``auto`` takes CUDA, then MPS, then the CPU.

    Raises:
        UserError: the device is unknown or absent on this machine.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f'{key} = "{name}" is not a device; use "auto", "cpu", "cuda" or "mps".') from None
    if device.type not in ("cpu", "cuda", "mps"):
        raise UserError(f'{key} = "{name}" is not supported; use "auto", "cpu", "cuda" or "mps".')
    count = {"cuda": torch.cuda.device_count()}.get(device.type, 1)
    if device.index is not None and count and device.index >= count:
        raise UserError(f'{key} = "{name}": this machine has {count} of them, counted from 0.')
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f'{key} = "{name}": this machine offers no CUDA device; use "cpu" or "auto".')
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError(f'{key} = "{name}": this machine offers no Apple GPU; use "cpu" or "auto".')
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of the frozen base; ``auto`` is float32 on a CPU and bfloat16 elsewhere."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return DTYPES[name]


def check_dtype(dtype: torch.dtype, device: torch.device, key: str = "model.dtype") -> None:
    """See that a device computes in a dtype: older Macs lack bfloat16; CUDA devices and CPUs have all of ``DTYPES``.

    Raises:
        UserError: it does not.
    """
    if device.type != "mps":
        return
    try:
        torch.ones(1, dtype=dtype, device=device).add(1)
    except (RuntimeError, TypeError):
        name = str(dtype).removeprefix("torch.")
        raise UserError(f'{key} = "{name}" is not supported by {device} on this machine; use "float32".') from None


@contextmanager
def denormals_flushed() -> Iterator[None]:
    """Numbers below 1e-38 are zero inside, where the processor can do that; each costs it a hundred others otherwise.

    Activation functions are full of them. Threads that torch starts inside do the same.
    """
    before = bool((torch.tensor([1e-40]) * 1.0).item() == 0)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


@contextmanager
def compute(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """The context around precompute, training, validation and previews.

    float32 runs as it is. A 16-bit base runs under autocast of that dtype, so that float32 adapters meet
    16-bit activations without a cast of every layer input to float32.
    """
    if dtype == torch.float32:
        with torch.autocast(device.type, enabled=False):
            yield
    else:
        with torch.autocast(device.type, dtype=dtype, cache_enabled=False):
            yield
