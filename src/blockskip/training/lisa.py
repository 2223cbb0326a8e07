"""LISA (arXiv 2403.17919): every period, a few random blocks are trained with their full weights; all else is frozen.

    steps      0 .. 49 | 50 .. 99 | 100 .. 149          period 50, two blocks
    blocks     2, 7    | 0, 2     | 5, 9                a pure function of seed and period

The trained weights have a float32 master each: the parameter itself where the base is float32; else a copy that the
optimiser works on and that is rounded into the model after each step, so that the model runs in the base's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from blockskip.method.layout import BlockLayout
from blockskip.seeds import derive_seed


def blocks_of(seed: int, period: int, num_blocks: int, count: int) -> tuple[int, ...]:
    """The numbers of the blocks that are trained in a period, ascending."""
    shuffled = sorted(range(num_blocks), key=lambda index: derive_seed(seed, "lisa", period, index))
    return tuple(sorted(shuffled[:count]))


def blocks_until(seed: int, steps: int, period: int, num_blocks: int, count: int) -> list[tuple[int, ...]]:
    """The blocks of every period that begins before optimiser step ``steps``."""
    return [blocks_of(seed, number, num_blocks, count) for number in range(-(-steps // period))]


class LisaBlocks:
    """The blocks of a whole, frozen model that are trained now, and the weights of those that were.

    Args:
        count, period: blocks that are trained at a time, and for how many optimiser steps.
        seed: of the run.
    """

    def __init__(self, model: nn.Module, layout: BlockLayout, count: int, period: int, seed: int) -> None:
        self._count, self.period, self._seed = count, period, seed
        self._names = layout.names(model)
        self._blocks = dict(zip(self._names, layout.blocks(model), strict=True))
        self._now: int | None = None
        self._kept: dict[str, torch.Tensor] = {}  # masters of blocks that are frozen again, on the host
        self._touched: set[str] = set()
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        #: The trained parameters of the model, each with its master, in a fixed order.
        self.pairs: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The masters of the blocks that are trained now, float32."""
        return [master for _, master in self.pairs.values()]

    def begin(self, step: int) -> bool:
        """Unfreeze the blocks of an optimiser step's period and freeze the others; whether that changed the blocks."""
        if step // self.period == self._now:
            return False
        self._freeze()
        self._now = step // self.period
        for index in blocks_of(self._seed, self._now, len(self._names), self._count):
            block = self._names[index]
            first = block not in self._touched
            self._touched.add(block)
            for name, parameter in sorted(self._blocks[block].named_parameters()):
                full, master = f"{block}.{name}", parameter.requires_grad_(True)
                if parameter.dtype == torch.float32:
                    if first:  # memory of its own: it may be the model's file
                        parameter.data = parameter.data.clone()
                else:
                    kept = self._kept.pop(full, parameter.detach())
                    master = nn.Parameter(kept.to(parameter.device, torch.float32))
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(_gives_to(master)))
                self.pairs[full] = (parameter, master)
        return True

    def written(self) -> None:
        """Round the masters into the model; called after each step of the optimiser."""
        with torch.no_grad():
            for parameter, master in self.pairs.values():
                if master is not parameter:
                    parameter.copy_(master)

    def state(self) -> dict[str, torch.Tensor]:
        """The weights of every block that was trained so far, float32, by full name."""
        found = {}
        for block in sorted(self._touched):
            for name, parameter in sorted(self._blocks[block].named_parameters()):
                full = f"{block}.{name}"
                found[full] = self.pairs[full][1].detach() if full in self.pairs else self._kept.get(full, parameter)
        return {name: value.detach() for name, value in found.items()}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Set the weights of a ``state``, before the first ``begin``.

        Raises:
            ValueError: they are not those of whole blocks of this model.
        """
        own = {
            f"{block}.{name}": value
            for block, part in self._blocks.items() for name, value in part.named_parameters()
        }  # fmt: skip
        blocks = {name for name in self._names if any(key.startswith(f"{name}.") for key in state)}
        expected = {key for key in own if any(key.startswith(f"{name}.") for name in blocks)}
        if set(state) != expected or any(own[key].shape != value.shape for key, value in state.items()):
            raise ValueError("the stored weights are not of this model's blocks")
        self._touched |= blocks
        with torch.no_grad():
            for key, value in state.items():
                own[key].data = value.to(own[key].device, own[key].dtype, copy=True)
                if own[key].dtype != torch.float32:
                    self._kept[key] = value.float()

    def _freeze(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for full, (parameter, master) in self.pairs.items():
            parameter.requires_grad_(False)
            parameter.grad = None
            if master is not parameter:
                self._kept[full] = master.detach().cpu()
        self.pairs, self._hooks = {}, []


def _gives_to(master: nn.Parameter):  # type: ignore[no-untyped-def]
    """A hook that adds a parameter's gradient to its master's, and drops it."""

    def give(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad += parameter.grad
        parameter.grad = None

    return give
