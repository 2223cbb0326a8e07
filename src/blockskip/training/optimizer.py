"""AdamW, its moments in 32 or in 8 bits, and the learning rate, which is a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from blockskip.config import TrainConfig
from blockskip.errors import UserError

#: Code books of bitsandbytes that the states of all parameters refer to, and none has of its own.
CODE_BOOKS = ("qmap1", "qmap2")


def check_optimizer(optimizer: str, device: torch.device) -> None:
    """See that an optimiser (a value of ``train.optimizer``) can run on a device.

    Raises:
        UserError: it needs bitsandbytes, which is not installed or has no kernel for the device.
    """
    if optimizer == "adamw":
        return
    if device.type == "mps":
        raise UserError(f'train.optimizer = "{optimizer}" runs on CUDA and CPUs, not on {device.type}; use "adamw".')
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        raise UserError(
            f'train.optimizer = "{optimizer}" needs bitsandbytes: pip install "dit-blockskip[quantization]".'
        ) from None


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of optimiser step ``step`` (from 0): linear warm-up, then constant, cosine or linear to zero.

    The last step's rate is above zero; a run that is continued with more steps follows the curve of the new total.
    """
    if step < config.lr_warmup_steps:
        return config.learning_rate * (step + 1) / config.lr_warmup_steps
    done = (step - config.lr_warmup_steps) / max(1, config.steps - config.lr_warmup_steps)
    factor = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[config.lr_scheduler]
    return config.learning_rate * factor


def make_optimizer(parameters: Sequence[nn.Parameter], config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW over the LoRA parameters, one tensor at a time (no second copy of all of them).

    ``adamw8bit`` is bitsandbytes': both moments as uint8 with a float32 scale for each 256 values, 2.03 bytes a
    parameter instead of 8; those of tensors with fewer than 4096 values stay float32.
    """
    if config.optimizer == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit

        eight: torch.optim.Optimizer = AdamW8bit(parameters, config.learning_rate, weight_decay=config.weight_decay)
        return eight
    return torch.optim.AdamW(
        parameters, lr=config.learning_rate, weight_decay=config.weight_decay, foreach=False, fused=False
    )


def parameter_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
    """What an optimiser keeps for one parameter, by name, numbers as tensors; empty before its first step."""
    entry: Mapping[str, Any] = optimizer.state.get(parameter, {})
    return {name: torch.as_tensor(value) for name, value in entry.items() if name not in CODE_BOOKS}


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimiser's tensors, named ``<parameter's position>.<name>``."""
    parameters = optimizer.param_groups[0]["params"]
    return {
        f"{index}.{name}": value
        for index, parameter in enumerate(parameters)
        for name, value in parameter_state(optimizer, parameter).items()
    }


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, torch.Tensor]) -> None:
    """Set the optimiser's tensors; the learning rate and the other settings stay those of the config."""
    entries: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in state.items():
        index, _, leaf = name.partition(".")
        entries.setdefault(int(index), {})[leaf] = value
    if isinstance(optimizer, torch.optim.AdamW):
        optimizer.load_state_dict(optimizer.state_dict() | {"state": entries})
        return
    (group,) = optimizer.param_groups
    for index, entry in entries.items():
        parameter = group["params"][index]
        optimizer.init_state(group, parameter, 0, index)  # type: ignore[attr-defined]
        own = optimizer.state[parameter]
        for name, value in entry.items():
            own[name] = own[name].copy_(value) if isinstance(own[name], torch.Tensor) else value.item()
