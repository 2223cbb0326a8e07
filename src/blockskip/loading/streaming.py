"""Blocks of a transformer that are read from the file whenever they are run, ahead of their turn if asked."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch
from torch import nn

from blockskip.errors import UserError
from blockskip.loading.source import ModelSource
from blockskip.loading.transformer import Adapters, empty_transformer
from blockskip.loading.weights import Weights
from blockskip.method.streaming import Read, install_streamed

Tensors = dict[str, torch.Tensor]


def reads_ahead(device: torch.device) -> bool:
    """Whether reading ahead pays: where the next block's copy runs beside the computation. It takes a second block."""
    return device.type == "cuda"


def stream_blocks(
    model: nn.Module,
    source: ModelSource,
    indices: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    adapters: Adapters | None = None,
    *,
    prefetch: bool = False,
) -> None:
    """Put streamed blocks, frozen and in eval mode, where stubs stand in a transformer.

    Args:
        indices: of the blocks, ascending.
        dtype: of their floating-point weights while they are in memory.
        adapters: frozen adapters to attach to their layers; these stay in memory.
        prefetch: read the next block while one computes: two blocks are in memory instead of one.

    Raises:
        UserError: the model's files lack a tensor of these blocks.
    """
    layout, weights = source.family.layout, Weights(source.part_folder("transformer"))
    names, empty = layout.names(model), layout.blocks(empty_transformer(source))
    blocks = {index: empty[index].to(dtype).requires_grad_(False).eval() for index in indices}
    for index, block in blocks.items():
        stored = set(weights.under(names[index]))
        for name in block.state_dict():
            if f"{names[index]}.{name}" not in stored:
                raise UserError(f'"{weights.folder}" lacks the tensor "{names[index]}.{name}"; fetch the model again.')
        if adapters is not None:
            adapters.attach(block, names[index], device)

    def read(index: int) -> Tensors:
        return weights.inside(names[index], dtype, device)

    install_streamed(model, layout, blocks, ReadAhead(read, indices, device) if prefetch else read)


class ReadAhead:
    """A ``read`` that gives blocks in any order, and is quick where they come up and down in turns.

    The block that comes next in training is read by a thread meanwhile:

        0 1 2 3 | 3 2 1 0 | 0 1 2 3 | ...        forward, backward, forward

    At most two blocks are in memory, the one that was given last and the next one, if whoever asks has dropped the
    block before. On CUDA the copy to the device runs on a stream of its own.

    Args:
        read: gives the tensors of a block on the device.
        order: the numbers of the blocks, as the forward pass asks for them.
        device: of the tensors.
    """

    def __init__(self, read: Read, order: Sequence[int], device: torch.device) -> None:
        self._read, self._order, self._device = read, list(order), device
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "blockskip-read-ahead")
        self._next: tuple[int, Future[tuple[Tensors, torch.cuda.Event | None]]] | None = None
        self._place, self._step = -1, 1

    def __call__(self, index: int) -> Tensors:
        """The tensors of block ``index``; what the thread raised for it is raised here."""
        expected, self._next = self._next, None
        if expected is not None and expected[0] == index:
            tensors, copied = expected[1].result()
        else:
            if expected is not None:
                wait([expected[1]])  # never three blocks
            expected = None
            tensors, copied = self._read(index), None
        reached = None
        if self._copies is not None:
            here = torch.cuda.current_stream(self._device)
            if copied is not None:
                here.wait_event(copied)
                for tensor in tensors.values():
                    tensor.record_stream(here)  # its memory is not given to a copy while a computation here uses it
            reached = here.record_event()
        following = self._following(self._order.index(index))
        self._next = following, self._thread.submit(self._fetch, following, reached)
        return tensors

    def _following(self, place: int) -> int:
        """The block that comes after the one at a place in the order; at an end, and when it turns, the same again."""
        if place == self._place:
            self._step = -self._step
        elif self._place >= 0:
            self._step = 1 if place > self._place else -1
        self._place = place
        following = place + self._step
        return self._order[following if 0 <= following < len(self._order) else place]

    def _fetch(self, index: int, reached: torch.cuda.Event | None) -> tuple[Tensors, torch.cuda.Event | None]:
        if self._copies is None or reached is None:
            return self._read(index), None
        reached.synchronize()  # the block before the given one is done with: its memory is free for this one
        with torch.cuda.stream(self._copies):
            return self._read(index), self._copies.record_event()
