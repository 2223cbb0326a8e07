"""The optimiser on fake tensors: it takes one tensor after the other, so that a few of them show what all need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from blockskip.config import TrainConfig
from blockskip.training.optimizer import CODE_BOOKS, make_optimizer


def fake_optimizer(parameters: Sequence[nn.Parameter], config: TrainConfig) -> torch.optim.Optimizer:
    """``make_optimizer`` where tensors are fake: what it computes by values, such as code books, is real."""
    with unset_fake_temporarily():
        return make_optimizer(parameters, config)


def make_state(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Give every parameter the state that its first update makes; all of them need a gradient."""
    update(optimizer, parameters)
    made = {value.shape: optimizer.state[value] for value in parameters if value in optimizer.state}
    for parameter in parameters:
        if parameter not in optimizer.state:
            optimizer.state[parameter] = {name: _like(name, value) for name, value in made[parameter.shape].items()}


def update(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Update neighbours of every pair of shapes, while the others and their gradients wait.

    Neighbours, since what was made for one parameter may be alive until the same is made for the next.
    """
    due = [value for value in parameters if value.grad is not None]
    pairs = {(one.shape, other.shape): (one, other) for one, other in zip(due, due[1:] or due, strict=False)}
    given = {id(value): value.grad for value in due}
    for parameter in due:
        parameter.grad = None
    for pair in pairs.values():
        for parameter in pair:
            parameter.grad = given[id(parameter)]
        optimizer.step()
        for parameter in pair:
            parameter.grad = None
    for parameter in due:
        parameter.grad = given[id(parameter)]


def _like(name: str, value: Any) -> Any:
    own = isinstance(value, torch.Tensor) and name not in CODE_BOOKS
    return torch.empty_like(value) if own else value
