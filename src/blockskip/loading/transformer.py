"""The transformer without the blocks that a phase does not need, and its blocks one at a time."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import diffusers
import torch
from accelerate import init_empty_weights
from torch import nn

from blockskip.loading.ahead import BlockWeights, reading_ahead
from blockskip.loading.quantized import Quantization, fill_quantized
from blockskip.loading.source import ModelSource
from blockskip.loading.weights import Weights
from blockskip.method.ahead import AheadOfBlocks
from blockskip.method.layout import State
from blockskip.method.skipping import install_stubs, run_block, run_head
from blockskip.method.streaming import Read
from blockskip.waiting import InMemory, Waiting


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
        read_ahead: whether ``run`` copies the next block to a device of its own while one computes.
    """

    def __init__(
        self, source: ModelSource, dtype: torch.dtype, device: torch.device, adapters: Adapters | None = None,
        *, read_ahead: bool = True,
    ) -> None:  # fmt: skip
        self.layout = source.family.layout
        self.model, self._empty = _load(source, None, dtype, device, adapters)
        self._names = self.layout.names(self.model)
        self._blocks = BlockWeights(Weights(source.part_folder("transformer")), self._names, dtype, device)
        self._device, self._adapters, self._read_ahead = device, adapters, read_ahead

    @property
    def num_blocks(self) -> int:
        """L."""
        return len(self._names)

    @contextmanager
    def block(self, index: int, read: Read | None = None) -> Iterator[nn.Module]:
        """Block ``index`` with its weights, in its place in the model; a stub again afterwards.

        Args:
            read: gives the weights; default: read from the file now.
        """
        name = self._names[index]
        block = copy.deepcopy(self._empty[index])
        block.load_state_dict((read or self._blocks)(index), assign=True)
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
        waiting: Waiting | None = None,
    ) -> Iterator[tuple[int, Any, torch.Tensor]]:
        """Block after block, every call through each: one block's weights and one state per call are in memory.

        The next block is fetched meanwhile (``loading.ahead``); on a device of its own it is a second one in memory.

        Args:
            calls: each gives the keyword arguments of ``forward`` for one group; asked anew for every block.
            visit: told (block, call, what leaves the block, the image or joint stream that entered it).
            stop: run blocks 0..stop-1 only, and no head.
            keep: the device on which states wait between blocks; default: where they are.
            waiting: where they wait instead.

        Yields:
            (call, the model's output, the image tokens that entered the head), unless ``stop`` is given.
        """
        waiting = InMemory(keep) if waiting is None else waiting
        ahead = AheadOfBlocks(self.model, self.layout, keep, share=isinstance(waiting, InMemory))
        count = self.num_blocks if stop is None else stop
        following = dict(itertools.pairwise(range(count)))
        read = reading_ahead(self._blocks, following.get, self._read_ahead)
        for index in range(count):
            with self.block(index, read):
                for call, inputs in enumerate(calls):
                    with self._ahead(ahead, waiting, index, call):
                        state, entered = run_block(self.model, self.layout, index, self._state(waiting, call), inputs())
                    if visit is not None:
                        visit(index, call, state, entered)
                    waiting.put(call, "state", state)
                    del state, entered
        del read
        if stop is not None:
            return
        for call, inputs in enumerate(calls):
            with self._ahead(ahead, waiting, self.num_blocks, call):
                output, entered = run_head(self.model, self.layout, self._state(waiting, call) or {}, inputs())
            waiting.take(call, "ahead")
            yield call, output, entered

    @contextmanager
    def _ahead(self, ahead: AheadOfBlocks, waiting: Waiting, index: int, call: int) -> Iterator[None]:
        """From pass 1 on, whose inputs may be fewer than those of pass 0, what precedes the blocks is computed once."""
        if index == 1:
            with ahead.kept() as kept:
                yield
            waiting.put(call, "ahead", kept)
        elif index and (outputs := waiting.get(call, "ahead")) is not None:
            with ahead.given(outputs, self._device):
                yield
        else:
            yield

    def _state(self, waiting: Waiting, call: int) -> State | None:
        """What the block before left, where it computes; it waits no more."""
        state: State | None = waiting.take(call, "state")
        return state and {name: value.to(self._device) for name, value in state.items()}
