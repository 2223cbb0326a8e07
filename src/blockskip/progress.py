"""What is being done, how far it is and how long it still takes: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from tqdm import tqdm

#: Seconds between two plain lines where there is no terminal.
LINE_EVERY = 5.0

_BAR = "{desc}  {percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt}  {remaining} left{postfix}"
_DONE = "{desc}  {percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt}  in {elapsed}{postfix}"


class _Output:
    """What the open displays share."""

    def __init__(self) -> None:
        self.depth = 0
        self.silenced = 0
        self.last_line = float("-inf")

    @property
    def quiet(self) -> bool:
        return self.silenced > 0 or os.environ.get("BLOCKSKIP_QUIET", "") not in ("", "0")


_output = _Output()


def clock(seconds: float) -> str:
    """``0:42``, ``12:05`` or ``1:02:03``."""
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Progress:
    """How far one phase is; ``progress`` makes it."""

    def __init__(self, total: int, what: str, start: int, nested: bool) -> None:
        self.total, self.done, self.what, self.note = total, start, what, ""
        self._start, self._nested, self._began = start, nested, time.monotonic()
        self._first: tuple[float, int] | None = None
        self._bar: tqdm[None] | None = None
        if not _output.quiet and sys.stderr.isatty():
            columns, lines = shutil.get_terminal_size()  # never 0, as a terminal may say of itself
            self._bar = tqdm(
                total=total,
                initial=start,
                desc=what,
                file=sys.stderr,
                leave=not nested,
                ncols=columns - 1,
                nrows=lines,
                bar_format=_BAR,
            )

    def advance(self, n: int = 1, note: str = "") -> None:
        """``n`` more units are done; the note (``loss 0.123``) stands behind the figures until the next one."""
        self.done += n
        self._first = self._first or (time.monotonic(), self.done)
        self.note = " ".join(note.split()) or self.note
        if self._bar is not None:
            self._bar.set_postfix_str(self.note, refresh=False)
            self._bar.update(n)
        elif self.done < self.total and min(self.seconds, time.monotonic() - _output.last_line) >= LINE_EVERY:
            self._line(f"{clock(self.left)} left")

    @property
    def seconds(self) -> float:
        """Since the phase began."""
        return time.monotonic() - self._began

    @property
    def left(self) -> float:
        """Seconds that the rest takes at the mean speed since the first advance, before which there may be a set-up."""
        began, done = self._first if self._first and self._first[1] < self.done else (self._began, self._start)
        return (time.monotonic() - began) * max(0, self.total - self.done) / max(1, self.done - done)

    def _line(self, timing: str) -> None:
        _output.last_line = time.monotonic()
        percent = 100 * self.done // self.total if self.total else 100
        parts = [self.what, f"{self.done}/{self.total}", f"{percent}%", timing, self.note]
        _print("  ".join(part for part in parts if part), sys.stderr)

    def _close(self) -> None:
        finished = self.done >= self.total
        if self._bar is not None:
            if finished:
                self._bar.bar_format = _DONE
            self._bar.close()
        elif not self._nested or self.seconds >= LINE_EVERY:  # many short inner phases print nothing of their own
            self._line(f"in {clock(self.seconds)}" if finished else f"stopped after {clock(self.seconds)}")


@contextmanager
def progress(total: int, what: str, start: int = 0) -> Iterator[Progress]:
    """Shows a phase on standard error while it runs; may be nested.

    Args:
        total: units of the whole phase.
        what: its name in a word or two.
        start: units that an earlier process did; they count as done but not for the speed.
    """
    shown = Progress(total, what, start, nested=_output.depth > 0)
    _output.depth += 1
    try:
        yield shown
    finally:
        _output.depth -= 1
        shown._close()


def say(text: str) -> None:
    """Prints a line on standard output, above any bar. Silent when quiet."""
    if not _output.quiet:
        _print(text, sys.stdout)


@contextmanager
def quiet() -> Iterator[None]:
    """Silences ``progress`` and ``say`` inside; the environment variable BLOCKSKIP_QUIET=1 does so everywhere."""
    _output.silenced += 1
    try:
        yield
    finally:
        _output.silenced -= 1


def _print(text: str, stream: TextIO) -> None:
    if _output.quiet:
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"  # a Windows pipe may know no emoji
    text = text.encode(encoding, "replace").decode(encoding)
    if sys.stderr.isatty():
        tqdm.write(text, file=stream)
    else:
        print(text, file=stream, flush=True)
