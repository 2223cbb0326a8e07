"""Writing behind: a few threads write groups while the next ones are computed.

A group's file reaches the disk before it gets its name, which takes the disk some milliseconds and this process hardly
any; several files on their way at once share the wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch

Group = dict[str, torch.Tensor]
#: Files on their way at a time, and groups that may wait for their turn.
THREADS, WAITING = 4, 8


@contextmanager
def write_behind(write: Callable[[str, Group], object]) -> Iterator[Callable[[str, Group], None]]:
    """A function that takes a key and a group and returns before they are written; all are when the context ends.

    What ``write`` raises is raised by a later call or at the end; groups that still wait are then given up.

    Args:
        write: writes one group; called from several threads at once.
    """
    begun: deque[Future[object]] = deque()
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="blockskip-write-behind")

    def put(key: str, group: Group) -> None:
        while begun and (len(begun) >= THREADS + WAITING or begun[0].done()):
            begun.popleft().result()
        begun.append(pool.submit(write, key, group))

    try:
        yield put
        while begun:
            begun.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
