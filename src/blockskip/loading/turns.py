"""Several calls that go on together, one at a time: each runs in a thread of its own until it lets the next one go on.

call 1   read layer 0 | layer 0 |         | read layer 1 | layer 1 |         | ...
call 2                |         | layer 0 |              |         | layer 1 |
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


class _Stopped(BaseException):
    """Unwinds a call because another one failed."""


class Turns:
    """The line in which calls wait for their turn.

    Only one of them ever runs, and where it hands over is fixed by the calls, so that results are those of running
    them one after the other. What torch keeps by thread (``no_grad``, autocast) has to be entered inside a call.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._line: deque[threading.Thread] = deque()
        self._stopped = False

    def run(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """What the calls return, in their order.

        Raises:
            BaseException: what a call raised; the others are unwound at their next turn.
        """
        results: dict[int, T] = {}
        errors: list[BaseException] = []

        def work(index: int) -> None:
            try:
                self._wait()
                results[index] = calls[index]()
            except _Stopped:
                pass
            except BaseException as error:  # raised again by the thread that asked
                errors.append(error)
                self._stopped = True
            finally:
                with self._changed:
                    self._line.remove(threading.current_thread())
                    self._changed.notify_all()

        self._stopped = False
        threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(len(calls))]
        self._line.extend(threads)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException:  # an interrupt: nothing may go on behind the caller's back
            with self._changed:
                self._stopped = True
                self._changed.notify_all()
            for thread in threads:
                if thread.is_alive():
                    thread.join()
            self._line.clear()
            raise
        if errors:
            raise errors[0]
        return [results[index] for index in range(len(calls))]

    def next_turn(self) -> None:
        """Let all others run until they say the same, then go on; does nothing outside a call of ``run``."""
        if threading.current_thread() in self._line:
            with self._changed:
                self._line.rotate(-1)
                self._changed.notify_all()
            self._wait()

    def _wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._line[0] is threading.current_thread())
        if self._stopped:
            raise _Stopped
