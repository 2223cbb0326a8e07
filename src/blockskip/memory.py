"""Giving memory back when a phase is over, and what is known when there is none left."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import re
import sys
import traceback
from typing import Any

import torch

#: What libraries say when there is no memory left: CUDA, MPS (whose single buffers have a limit of their own), CPU
#: allocators of Linux and Windows, the system, cuBLAS and cuDNN.
NO_MEMORY = (
    "out of memory", "can't allocate memory", "not enough memory", "cannot allocate memory", "invalid buffer size",
    "status_alloc_failed",
)  # fmt: skip
#: Bytes from which ``return_freed`` returns a block: what glibc itself begins with.
RETURNED_FROM = 128 * 2**10
_M_MMAP_THRESHOLD = -3
_SCALE = {"b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


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
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the host or the device has no memory left."""
    text = str(error).lower()
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, (RuntimeError, OSError)) and any(word in text for word in NO_MEMORY)
    )


def asked_bytes(error: BaseException) -> int | None:
    """The size of the allocation that failed, where the error tells it."""
    found = re.search(r"allocate ([0-9.]+) ?([KMGT]?)(i?B|bytes)", str(error))
    return int(float(found[1]) * _SCALE[found[2].lower() or "b"]) if found else None


def free_memory(device: torch.device) -> tuple[int, int] | None:
    """(free, all) bytes of an accelerator's memory, of a CPU those of the machine; None where nobody tells."""
    try:
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            return int(free), int(total)
        if device.type == "mps":
            total = torch.mps.recommended_max_memory()
            return max(0, total - torch.mps.driver_allocated_memory()), total
        import psutil

        memory = psutil.virtual_memory()
        return int(memory.available), int(memory.total)
    except Exception:  # asked when memory has run out: whatever fails here must not hide that
        return None


def process_limit() -> int | None:
    """Bytes of address space that the system lets this process have (``ulimit -v``); None: as many as it wants."""
    try:
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        return None if limit == resource.RLIM_INFINITY else limit
    except (ImportError, AttributeError, OSError, ValueError):
        return None


def let_go(error: BaseException) -> None:
    """Give back what the functions that an error passed through still hold: models, tensors, graphs."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
    release()


def return_freed() -> bool:
    """Make the C library give every larger block back to the system as soon as it is freed; for the whole process.

    glibc raises the size from which it does so to that of the blocks that it has seen freed, up to 32 MiB, and what is
    smaller comes from one heap, whose holes are not always used again: until version 2.38 an aligned block, as every
    tensor is, does not fit the hole that one of its own size has left (its bug 14581).

    Returns:
        Whether it could be done: False where the C library is another.
    """
    library = _glibc()
    return library is not None and bool(library.mallopt(_M_MMAP_THRESHOLD, RETURNED_FROM))


@functools.cache
def _glibc() -> Any:
    """The C library, or None where it is another."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            library = ctypes.CDLL("libc.so.6")
            return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None
    return None
