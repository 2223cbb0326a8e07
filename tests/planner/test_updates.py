"""The optimiser on fake tensors: one parameter of each shape shows the state and the peak that all of them have."""

from typing import Any

import pytest
import torch
from torch import nn

from blockskip.config import TrainConfig
from blockskip.planner.counting import LiveBytes
from blockskip.planner.parts import fake_tensors
from blockskip.planner.updates import fake_optimizer, make_state, update
from blockskip.training.optimizer import make_optimizer, parameter_state

#: Two large ones are neighbours only of small ones, and of one another in the second list.
SHAPES = (
    ((64, 80), (80, 64), (64, 8), (300, 16), (64, 8), (300, 16), (64, 8), (8, 64)),
    ((64, 8), (300, 16), (300, 16), (64, 8), (300, 16)),
    ((64, 8),),
)


def counted(
    shapes: tuple[tuple[int, int], ...], kind: Any, short: bool
) -> tuple[LiveBytes, list[dict[str, tuple[torch.Size, torch.dtype]]]]:
    """Two steps of all parameters, the first of which makes their state."""
    with fake_tensors(), LiveBytes() as live:
        parameters = [nn.Parameter(torch.empty(shape)) for shape in shapes]
        optimizer = fake_optimizer(parameters, TrainConfig(optimizer=kind))
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        with live.role("optimizer"):
            if short:
                make_state(optimizer, parameters)
            else:
                optimizer.step()
        live.reset_peaks()
        with live.role("optimizer"):
            if short:
                update(optimizer, parameters)
            else:
                optimizer.step()
        assert all(parameter.grad is not None for parameter in parameters)
        states = [
            {name: (value.shape, value.dtype) for name, value in parameter_state(optimizer, parameter).items()}
            for parameter in parameters
        ]
    return live, states


@pytest.mark.parametrize("kind", ["adamw", "adamw8bit"])
@pytest.mark.parametrize("shapes", SHAPES)
def test_the_state_and_the_peak_are_those_of_updating_everything(
    shapes: tuple[tuple[int, int], ...], kind: str
) -> None:
    (short, states), (whole, wanted) = counted(shapes, kind, True), counted(shapes, kind, False)
    assert states == wanted
    assert short.device_peak == whole.device_peak
    assert short.device_split == whole.device_split


@pytest.mark.parametrize("kind", ["adamw", "adamw8bit"])
def test_the_state_is_that_of_a_real_step(kind: Any) -> None:
    _, states = counted(SHAPES[0], kind, True)
    parameters = [nn.Parameter(torch.ones(shape)) for shape in SHAPES[0]]
    optimizer = make_optimizer(parameters, TrainConfig(optimizer=kind))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for parameter, state in zip(parameters, states, strict=True):
        real = parameter_state(optimizer, parameter)
        assert state == {name: (value.shape, value.dtype) for name, value in real.items()}
