"""The floating-point modes of a run, and that they end with it."""

import pytest
import torch

from blockskip.precision import denormals_flushed


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
