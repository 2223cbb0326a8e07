"""The loop is the same code for every family: here one with text in the blocks, one with cross-attention."""

import pytest

from blockskip.loading.source import ModelSource


@pytest.fixture(params=["flux", "sana"])
def source(request: pytest.FixtureRequest) -> ModelSource:
    """FLUX.1 and SANA, one after the other, where a test does not ask for others."""
    found: ModelSource = request.getfixturevalue(request.param)
    return found
