"""The transformer without the blocks that a phase does not need, and its blocks one at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import diffusers
import torch
from accelerate import init_empty_weights
from torch import nn

from blockskip.loading.quantized import Quantization, fill_quantized
from blockskip.loading.source import ModelSource
from blockskip.loading.weights import Weights
from blockskip.method.ahead import AheadOfBlocks, Outputs
from blockskip.method.layout import State
from blockskip.method.skipping import install_stubs, run_block, run_head


class Adapters(Protocol):
    """Frozen adapters that act beside the layers of the base."""

    def attach(self, module: nn.Module, prefix: str = "", device: torch.device | None = None) -> None:
        """Let the adapters act on every layer below ``module``, whose full name is ``prefix``."""


def empty_transformer(source: ModelSource) -> nn.Module:
    """The whole transformer without weights (on the meta device): its names and shapes, for checks and counts."""
    cls = getattr(diffusers, source.family.transformer_class)
    with init_empty_weights(include_buffers=False):
        model: nn.Module = cls.from_config(source.config("transformer"))
    source.family.prepare(model)
    return model


def load_transformer(
    source: ModelSource,
    skip: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    adapters: Adapters | None = None,
    quantization: Quantization | Literal["none"] = "none",
) -> nn.Module:
    """The frozen transformer in eval mode with stubs at the indices in ``skip``; only the other weights are read.

    Args:
        dtype: of the weights.
        adapters: frozen adapters to attach to the layers that are loaded.
        quantization: of the linear layers in the blocks that are loaded; all other weights stay as they are.
    """
    if quantization == "none":
        return _load(source, skip, dtype, device, adapters)[0]
    model, empty = _load(source, None, dtype, device, None)
    weights, layout = Weights(source.part_folder("transformer")), source.family.layout
    for index, name in enumerate(layout.names(model)):
        if index not in skip:
            block = fill_quantized(empty.pop(index), weights, name, quantization, dtype, device)
            layout.replace(model, index, block)
    if adapters is not None:
        adapters.attach(model)
    return model


def _load(
    source: ModelSource, skip: Sequence[int] | None, dtype: torch.dtype, device: torch.device, adapters: Adapters | None
) -> tuple[nn.Module, dict[int, nn.Module]]:
    model, layout = empty_transformer(source), source.family.layout
    removed = install_stubs(model, layout, range(layout.count(model)) if skip is None else skip)
    weights = Weights(source.part_folder("transformer"))
    model.load_state_dict(weights.named(model.state_dict(), dtype, device), assign=True)
    model = model.requires_grad_(False).eval().to(device)  # buffers that no file has keep their dtype, as in diffusers
    if adapters is not None:
        adapters.attach(model)
    return model, removed


class StreamedTransformer:
    """A transformer of stubs with its embedders and head, and its blocks one by one from the file.

    Args:
        model: every block is a stub, except while ``block`` holds one.
    """

    def __init__(
        self, source: ModelSource, dtype: torch.dtype, device: torch.device, adapters: Adapters | None = None
    ) -> None:
        self.layout = source.family.layout
        self.model, self._empty = _load(source, None, dtype, device, adapters)
        self._weights = Weights(source.part_folder("transformer"))
        self._names = self.layout.names(self.model)
        self._dtype, self._device, self._adapters = dtype, device, adapters

    @property
    def num_blocks(self) -> int:
        """L."""
        return len(self._names)

    @contextmanager
    def block(self, index: int) -> Iterator[nn.Module]:
        """Block ``index`` with its weights, in its place in the model; a stub again afterwards."""
        name = self._names[index]
        block = copy.deepcopy(self._empty[index])
        block.load_state_dict(self._weights.inside(name, self._dtype, self._device), assign=True)
        block.requires_grad_(False).eval()
        if self._adapters is not None:
            self._adapters.attach(block, name)
        stub = self.layout.replace(self.model, index, block)
        try:
            yield block
        finally:
            self.layout.replace(self.model, index, stub)

    def run(
        self,
        calls: Sequence[Callable[[], dict[str, Any]]],
        visit: Callable[[int, int, State, torch.Tensor], None] | None = None,
        *,
        stop: int | None = None,
        keep: torch.device | None = None,
    ) -> Iterator[tuple[int, Any, torch.Tensor]]:
        """Block after block, every call through each: one block's weights and one state per call are in memory.

        Args:
            calls: each gives the keyword arguments of ``forward`` for one group; asked anew for every block.
            visit: told (block, call, what leaves the block, the image or joint stream that entered it).
            stop: run blocks 0..stop-1 only, and no head.
            keep: where states wait between blocks; default: where they are.

        Yields:
            (call, the model's output, the image tokens that entered the head), unless ``stop`` is given.
        """
        states: list[State | None] = [None] * len(calls)
        ahead, outputs = AheadOfBlocks(self.model, self.layout, keep), dict[int, Outputs]()
        for index in range(self.num_blocks if stop is None else stop):
            with self.block(index):
                for call, inputs in enumerate(calls):
                    with self._ahead(ahead, outputs, index, call):
                        state, entered = run_block(self.model, self.layout, index, self._here(states[call]), inputs())
                    if visit is not None:
                        visit(index, call, state, entered)
                    states[call] = state if keep is None else {name: value.to(keep) for name, value in state.items()}
        if stop is not None:
            return
        for call, inputs in enumerate(calls):
            with self._ahead(ahead, outputs, self.num_blocks, call):
                output, entered = run_head(self.model, self.layout, self._here(states[call]) or {}, inputs())
            states[call] = None
            yield call, output, entered

    @contextmanager
    def _ahead(self, ahead: AheadOfBlocks, outputs: dict[int, Outputs], index: int, call: int) -> Iterator[None]:
        """From pass 1 on, whose inputs may be fewer than those of pass 0, what precedes the blocks is computed once."""
        if call in outputs:
            with ahead.given(outputs[call], self._device):
                yield
        elif index == 1:
            with ahead.kept() as kept:
                yield
            outputs[call] = kept
        else:
            yield

    def _here(self, state: State | None) -> State | None:
        return state and {name: value.to(self._device) for name, value in state.items()}
