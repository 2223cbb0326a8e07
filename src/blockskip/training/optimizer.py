"""AdamW and the learning rate, which is a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from blockskip.config import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of optimiser step ``step`` (from 0): linear warm-up, then constant, cosine or linear to zero.

    The last step's rate is above zero; a run that is continued with more steps follows the curve of the new total.
    """
    if step < config.lr_warmup_steps:
        return config.learning_rate * (step + 1) / config.lr_warmup_steps
    done = (step - config.lr_warmup_steps) / max(1, config.steps - config.lr_warmup_steps)
    factor = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[config.lr_scheduler]
    return config.learning_rate * factor


def make_optimizer(parameters: Sequence[nn.Parameter], config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over the LoRA parameters, one tensor at a time (no second copy of all of them)."""
    return torch.optim.AdamW(
        parameters, lr=config.learning_rate, weight_decay=config.weight_decay, foreach=False, fused=False
    )


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimiser's tensors, named ``<parameter's position>.<name>``."""
    state: dict[int, dict[str, Any]] = optimizer.state_dict()["state"]
    return {f"{index}.{name}": value for index, entry in state.items() for name, value in entry.items()}


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, torch.Tensor]) -> None:
    """Set the optimiser's tensors; the learning rate and the other settings stay those of the config."""
    document = optimizer.state_dict()
    entries: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in state.items():
        index, _, leaf = name.partition(".")
        entries.setdefault(int(index), {})[leaf] = value
    document["state"] = entries
    optimizer.load_state_dict(document)
