"""CUDA's autocast on a CPU: what it computes in float32 is float32, also where a backward pass computes it anew."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from blockskip.planner.autocast import CudaAutocast, like_device, run_like

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("function", [lambda x: F.layer_norm(x, (8,)), lambda x: x.softmax(-1), lambda x: x.pow(2)])
def test_norms_and_powers_are_float32_inside_autocast_only(function) -> None:  # type: ignore[no-untyped-def]
    value = torch.ones(2, 8, dtype=torch.bfloat16)
    with CudaAutocast():
        assert function(value).dtype == torch.bfloat16
        with torch.autocast("cpu", torch.bfloat16):
            assert function(value).dtype == torch.float32
            assert F.linear(value, torch.ones(8, 8)).dtype == torch.bfloat16
            assert F.layer_norm(value, normalized_shape=(8,), weight=torch.ones(8)).dtype == torch.float32


def test_other_devices_are_left_as_they_are() -> None:
    with like_device(CPU), torch.autocast("cpu", torch.bfloat16):
        assert torch.ones(2, 8, dtype=torch.bfloat16).pow(2).dtype == torch.bfloat16


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_a_checkpointed_block_is_computed_anew_as_it_was(device: torch.device) -> None:
    block = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    seen: list[torch.dtype] = []
    block[1].register_forward_hook(lambda _, args, output: seen.append(output.dtype))
    run_like(block, device)
    with like_device(device), torch.autocast("cpu", torch.bfloat16):
        loss = checkpoint(block, torch.ones(2, 8, requires_grad=True), use_reentrant=False).float().sum()
    loss.backward()
    assert seen == [torch.float32 if device == CUDA else torch.bfloat16] * 2
