"""Weights of blocks that are read one at a time, fetched by a thread before their turn.

a device of its own    the next block is copied there while one computes: two blocks are in its memory
device and host one    the next block's part of the file is brought into the system's cache: no memory of ours;
                       so it is with ``model.read_ahead`` off, on any device
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from blockskip.loading.weights import Weights

Tensors = dict[str, torch.Tensor]
#: Bytes that are asked for at a time: Linux fetches of one request no more than it would read ahead by itself, which
#: is 128 KiB unless someone raised it.
PIECE = 2**17
#: Bytes between two tensors in a file that are fetched with them.
GAP = 2**17
#: The block that comes after another one; None: that was the last.
Following = Callable[[int], int | None]


def reads_ahead(device: torch.device) -> bool:
    """Whether a second block is in memory: where the next block's copy runs beside the computation."""
    return device.type == "cuda"


class BlockWeights:
    """The tensors of a transformer's blocks, from its files.

    Args:
        names: full names of all blocks.
        dtype: of floating-point tensors in memory.
        device: of the tensors in memory.
    """

    def __init__(self, weights: Weights, names: Sequence[str], dtype: torch.dtype, device: torch.device) -> None:
        self.device = device
        self.weights, self._names, self._dtype = weights, names, dtype

    def __call__(self, index: int) -> Tensors:
        """The tensors of block ``index``, by their names inside it."""
        return self.weights.inside(self._names[index], self._dtype, self.device)

    def stored(self, index: int) -> list[str]:
        """The tensors of block ``index``, by their names in the files."""
        return self.weights.under(self._names[index])


def expect(weights: Weights, names: Sequence[str]) -> None:
    """Bring tensors into the system's cache of files, as far as it has room; what cannot be read is passed over."""
    with contextlib.suppress(OSError):
        for file, spans in weights.places(names).items():
            with file.open("rb", buffering=0) as stream:
                for begin, end in _joined(spans):
                    for place in range(begin, end, PIECE):
                        _ask(stream, place, min(PIECE, end - place))


def _ask(stream: io.FileIO, place: int, count: int) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(stream.fileno(), place, count, os.POSIX_FADV_WILLNEED)
    else:
        stream.seek(place)
        stream.read(count)


def _joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans in their order, those that are next to each other as one."""
    found: list[tuple[int, int]] = []
    for begin, end in spans:
        if found and begin - found[-1][1] < GAP:
            found[-1] = found[-1][0], end
        else:
            found.append((begin, end))
    return found


class Expecting:
    """A thread that brings tensors into the system's cache of files, a few names at a time."""

    def __init__(self, weights: Weights) -> None:
        self._weights, self._thread = weights, ThreadPoolExecutor(1, "blockskip-fetch")
        self._asked: Future[None] | None = None

    def soon(self, names: Sequence[str]) -> None:
        """Begin with these, unless it is still busy: a slow disk gets no queue."""
        if self._asked is None or self._asked.done():
            self._asked = self._thread.submit(expect, self._weights, names)


def reading_ahead(blocks: BlockWeights, following: Following, copied: bool = True) -> Callable[[int], Tensors]:
    """What gives blocks by their numbers, while a thread fetches the one that follows.

    Args:
        copied: whether it may be a second block in the memory of a device of its own (``model.read_ahead``).
    """
    if copied and reads_ahead(blocks.device):
        return ReadAhead(blocks, following, blocks.device)
    return ExpectAhead(blocks, following)


class BackAndForth:
    """Which block follows in training, where they come up and down in turns.

        0 1 2 3 | 3 2 1 0 | 0 1 2 3 | ...        forward, backward, forward

    Args:
        order: the numbers of the blocks, as the forward pass asks for them.
    """

    def __init__(self, order: Sequence[int]) -> None:
        self._order, self._place, self._step = list(order), -1, 1

    def __call__(self, index: int) -> int:
        """The block after ``index``, which is asked for now; at an end, and when the order turns, the same again."""
        place = self._order.index(index)
        if place == self._place:
            self._step = -self._step
        elif self._place >= 0:
            self._step = 1 if place > self._place else -1
        self._place = place
        following = place + self._step
        return self._order[following if 0 <= following < len(self._order) else place]


class ExpectAhead:
    """Gives blocks in any order; a thread asks the system to fetch the one that follows."""

    def __init__(self, blocks: BlockWeights, following: Following) -> None:
        self._blocks, self._following, self._expecting = blocks, following, Expecting(blocks.weights)

    def __call__(self, index: int) -> Tensors:
        """The tensors of block ``index``."""
        tensors, following = self._blocks(index), self._following(index)
        if following is not None:
            self._expecting.soon(self._blocks.stored(following))
        return tensors


class ReadAhead:
    """Gives blocks in any order, and is quick where the one that follows was foreseen.

    At most two blocks are in memory, the one that was given last and the next one, if whoever asks has dropped the
    block before. On CUDA the copy to the device runs on a stream of its own.

    Args:
        read: gives the tensors of a block on the device.
        following: the block that comes after one.
        device: of the tensors.
    """

    def __init__(self, read: Callable[[int], Tensors], following: Following, device: torch.device) -> None:
        self._read, self._following, self._device = read, following, device
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "blockskip-fetch")
        self._next: tuple[int, Future[tuple[Tensors, torch.cuda.Event | None]]] | None = None

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
        following = self._following(index)
        if following is not None:
            self._next = following, self._thread.submit(self._fetch, following, reached)
        return tensors

    def _fetch(self, index: int, reached: torch.cuda.Event | None) -> tuple[Tensors, torch.cuda.Event | None]:
        if self._copies is None or reached is None:
            return self._read(index), None
        reached.synchronize()  # the block before the given one is done with: its memory is free for this one
        with torch.cuda.stream(self._copies):
            return self._read(index), self._copies.record_event()
