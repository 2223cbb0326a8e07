"""Loading is the same code for every family: here one with text in the blocks, one with cross-attention."""

import pytest
import torch

from blockskip.loading.quantized import Quantization
from blockskip.loading.source import ModelSource


@pytest.fixture(params=["flux", "sana"])
def source(request: pytest.FixtureRequest) -> ModelSource:
    """FLUX.1 and SANA, one after the other, where a test does not ask for others."""
    found: ModelSource = request.getfixturevalue(request.param)
    return found


DEVICES = [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]


@pytest.fixture(params=["int8", "nf4"])
def quantization(request: pytest.FixtureRequest) -> Quantization:
    found: Quantization = request.param
    return found


@pytest.fixture(params=DEVICES, ids=str)
def device(request: pytest.FixtureRequest) -> torch.device:
    found: torch.device = request.param
    return found
