"""Giving memory back when a phase is over, so that the next one starts with what the process really needs."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import sys
from typing import Any

import torch


def release() -> None:
    """Collect what nothing refers to, and give freed memory back to the system and to the device.

    The C library of Linux keeps freed memory for itself; without this the next phase would be charged with it.
    """
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()
    trim()


def trim() -> None:
    """Give freed memory of the host back to the system; ``release`` without its collection, for use between layers."""
    give_back = _malloc_trim()
    if give_back is not None:
        give_back(0)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the host or the device has no memory left."""
    words = ("out of memory", "can't allocate memory", "not enough memory", "cannot allocate memory")
    text = str(error).lower()
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, (RuntimeError, OSError)) and any(word in text for word in words)
    )


@functools.cache
def _malloc_trim() -> Any:
    """glibc's function, or None where there is none."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            return ctypes.CDLL("libc.so.6").malloc_trim
    return None
