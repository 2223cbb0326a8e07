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
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Any:
    """glibc's function, or None where there is none."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            return ctypes.CDLL("libc.so.6").malloc_trim
    return None
