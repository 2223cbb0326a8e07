"""What counts as memory that has run out, and what is known of it."""

from __future__ import annotations

import errno
import mmap
import weakref

import numpy as np
import pytest
import torch

from blockskip.errors import UserError
from blockskip.memory import asked_bytes, free_memory, is_out_of_memory, let_go, process_limit

GIB = 2**30
CUDA = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 7.79 GiB of which 1.20 GiB is free."
)
MPS = (
    "MPS backend out of memory (MPS allocated: 17.02 GB, other allocations: 384.00 KB, max allowed: 18.13 GB). "
    "Tried to allocate 1.50 GB on private pool."
)
WINDOWS = "DefaultCPUAllocator: not enough memory: you tried to allocate 4096 bytes."


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (torch.OutOfMemoryError(CUDA), int(2.5 * GIB)),
        (RuntimeError("CUDA error: out of memory"), None),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), None),
        (RuntimeError(MPS), int(1.5 * GIB)),
        (RuntimeError("Invalid buffer size: 12.00 GB"), None),
        (RuntimeError(WINDOWS), 4096),
        (MemoryError(), None),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), None),
    ],
)
def test_messages_of_devices_and_systems(error: Exception, asked: int | None) -> None:
    assert is_out_of_memory(error)
    assert asked_bytes(error) == asked


@pytest.mark.parametrize(
    ("allocate", "asked"),
    [
        (lambda: torch.empty(2**47, dtype=torch.uint8), 2**47),
        (lambda: np.empty(2**47, dtype=np.uint8), 2**47),
        (lambda: bytearray(2**47), None),
        (lambda: mmap.mmap(-1, 2**47), None),
    ],
)
def test_what_this_machine_really_says(allocate, asked: int | None) -> None:
    with pytest.raises((MemoryError, RuntimeError, OSError)) as caught:
        allocate()
    assert is_out_of_memory(caught.value)
    assert asked_bytes(caught.value) == asked


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"),
        OSError(errno.ENOSPC, "No space left on device"),
        ValueError("out of memory"),
        UserError("out of memory"),
    ],
)
def test_what_is_something_else(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_free_memory_of_the_machine_and_of_a_device_that_is_not_there() -> None:
    free, total = free_memory(torch.device("cpu"))
    assert 0 < free < total
    if not torch.cuda.is_available():
        assert free_memory(torch.device("cuda")) is None


def test_the_limit_of_the_process() -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    assert process_limit() == (None if soft == resource.RLIM_INFINITY else soft)
    limit = 2**45 if hard == resource.RLIM_INFINITY else hard
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        assert process_limit() == limit
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_what_an_error_passed_through_is_let_go() -> None:
    """Also behind an error that hides another one."""
    kept = []

    def inner() -> None:
        tensor = torch.ones(10)
        kept.append(weakref.ref(tensor))
        raise MemoryError

    def outer() -> None:
        tensor = torch.ones(10)
        kept.append(weakref.ref(tensor))
        try:
            inner()
        except MemoryError as error:
            raise RuntimeError("out of memory") from error

    with pytest.raises(RuntimeError) as caught:
        outer()
    assert [one() is None for one in kept] == [False, False]
    let_go(caught.value)
    assert [one() is None for one in kept] == [True, True]
