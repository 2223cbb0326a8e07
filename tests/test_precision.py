"""The floating-point modes of a run, and that they end with it."""

import pytest
import torch

from blockskip.errors import UserError
from blockskip.precision import DTYPES, check_dtype, denormals_flushed


def tiny() -> bool:
    """Whether a number too small for a normal float32 counts."""
    return bool(torch.tensor([1e-40]).mul(1.0).item() != 0)


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="the processor cannot do it")
def test_denormals_are_zero_inside_alone_also_after_an_error() -> None:
    assert tiny()
    with denormals_flushed():
        assert not tiny()
        with denormals_flushed():
            pass
        assert not tiny()
    assert tiny()
    with pytest.raises(KeyError), denormals_flushed():
        raise KeyError
    assert tiny()


def test_a_dtype_that_an_apple_gpu_lacks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ones = torch.ones

    def like_an_older_mac(*size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if dtype == torch.bfloat16:
            raise TypeError("BFloat16 is not supported on MPS")
        return ones(*size, dtype=dtype)

    monkeypatch.setattr(torch, "ones", like_an_older_mac)
    for dtype in (torch.float32, torch.float16):
        check_dtype(dtype, torch.device("mps"))
    with pytest.raises(
        UserError, match=r'^dtype = "bfloat16" is not supported by mps on this machine; use "float32"\.$'
    ):
        check_dtype(torch.bfloat16, torch.device("mps"), "dtype")


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_a_cpu_has_every_dtype(dtype: torch.dtype) -> None:
    check_dtype(dtype, torch.device("cpu"))
    square = torch.ones(2, 2, dtype=dtype)
    assert torch.equal(square @ square, 2 * square)
