"""Reading ahead: a thread reads the next groups into buffers that are used over and over.

consumer   | group 0 |   group 1   | group 2 | ...      at any time one set of buffers is the consumer's,
thread     | 1 | 2 | waits | 3 |  waits  | 4 | ...      the others are read, or being read into
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Sequence

import torch

Group = dict[str, torch.Tensor]


def read_ahead(read: Callable[[str, Group], Group], keys: Sequence[str], depth: int) -> Generator[Group, None, None]:
    """The groups of the keys in their order, each read up to ``depth`` groups before it is asked for.

    What is yielded is valid until the next one is asked for. The thread begins with the first group that is asked for
    and ends when the iterator is closed, exhausted or collected; what it raises is raised here, at its group's turn.

    Args:
        read: reads the group of a key, into the tensors of an earlier group where they fit.
        keys: in the order of reading; they may repeat.
        depth: at least 1; at most ``depth + 1`` sets of tensors exist at a time.
    """
    free: queue.SimpleQueue[Group] = queue.SimpleQueue()
    ready: queue.SimpleQueue[Group | BaseException] = queue.SimpleQueue()
    stop = threading.Event()

    def fill() -> None:
        try:
            for key in keys:
                buffers = free.get()
                if stop.is_set():
                    return
                ready.put(read(key, buffers))
        except BaseException as error:
            ready.put(error)

    for _ in range(depth + 1):
        free.put({})
    thread = threading.Thread(target=fill, name="blockskip-read-ahead", daemon=True)
    thread.start()
    try:
        last: Group | None = None
        for _ in keys:
            group = ready.get()
            if last is not None:
                free.put(last)  # only now: the thread that this wakes is not to run before the next group is taken
            if isinstance(group, BaseException):
                raise group
            yield group
            last = group
    finally:
        stop.set()
        free.put({})  # wakes the thread
        thread.join()
