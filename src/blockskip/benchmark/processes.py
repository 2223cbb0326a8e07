"""Parts done side by side, each in a process of its own, with progress, time left and a time limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from blockskip.benchmark.parts import Part
from blockskip.errors import RunError
from blockskip.progress import clock, say
from blockskip.store.files import write_atomically
from blockskip.units import duration

#: Seconds between two looks at the processes, and between two lines on what they are doing.
LOOK_EVERY, TELL_EVERY = 0.2, 30.0


class Handle(Protocol):
    """A part that is being done."""

    def poll(self) -> int | None:
        """Its exit code, or None while it goes on."""

    def stop(self) -> None:
        """End it now; what it has finished stays."""


class Process:
    """A part in a process of its own; what it prints goes to ``log.txt`` in the part's folder.

    Args:
        threads: that it may compute with.
    """

    def __init__(self, part: Part, threads: int) -> None:
        part.folder.mkdir(parents=True, exist_ok=True)
        task = part.folder / "task.json"
        write_atomically(task, lambda path: path.write_text(json.dumps(part.task), encoding="utf-8"))
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        with (part.folder / "log.txt").open("a", encoding="utf-8") as log:
            command = [sys.executable, "-m", "blockskip.benchmark.worker", str(task)]
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)

    def poll(self) -> int | None:
        """Its exit code, or None while it goes on."""
        return self._process.poll()

    def stop(self) -> None:
        """End it and wait for that; checkpoints are whole, and it goes on from the last one."""
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def cores() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


def do(parts: Sequence[Part], jobs: int, seconds: float | None, start: Callable[[Part, int], Handle] = Process) -> bool:
    """Do the parts that are not done yet; returns False where the time limit stopped that.

    Args:
        jobs: how many at a time; each gets its share of the processors, or ``OMP_NUM_THREADS`` where that is set.
        seconds: the time limit; None: none.
        start: begins a part with a number of threads.

    Raises:
        RunError: parts failed; all others were done.
    """
    return _Doing(parts, jobs, seconds, start).all()


class _Doing:
    def __init__(
        self, parts: Sequence[Part], jobs: int, seconds: float | None, start: Callable[[Part, int], Handle]
    ) -> None:
        self.parts, self.jobs, self.start = parts, jobs, start
        self.threads = int(os.environ.get("OMP_NUM_THREADS") or max(1, cores() // jobs))
        self.until = None if seconds is None else time.monotonic() + seconds
        self.finished = {id(part) for part in parts if part.done}
        self.waiting = [part for part in parts if id(part) not in self.finished]
        self.running: dict[int, tuple[Part, Handle, float]] = {}
        self.took: dict[str, list[float]] = {}
        self.failed: list[Part] = []
        self.told = time.monotonic()

    def all(self) -> bool:
        if self.waiting:
            say(f"{len(self.waiting)} of {len(self.parts)} parts to do, {self.jobs} at a time with {self.threads} "
                f"{'thread' if self.threads == 1 else 'threads'} each.")  # fmt: skip
        try:
            while self.waiting or self.running:
                if self.until is not None and time.monotonic() >= self.until:
                    return False
                self._begin()
                if not self.running:
                    break  # what is waiting needs parts that failed
                self._look()
                self._tell()
                if self.running:
                    time.sleep(LOOK_EVERY)
        finally:
            for _, handle, _ in self.running.values():
                handle.stop()
        if self.failed:
            raise RunError("\n".join(
                f"{part.name} failed; the last line of {part.folder / 'log.txt'}: {_last_line(part.folder)}"
                for part in self.failed
            ))  # fmt: skip
        return True

    def _begin(self) -> None:
        for part in list(self.waiting):
            if len(self.running) >= self.jobs:
                return
            if all(id(needed) in self.finished for needed in part.needs):
                self.waiting.remove(part)
                self.running[id(part)] = (part, self.start(part, self.threads), time.monotonic())

    def _look(self) -> None:
        for name, (part, handle, began) in list(self.running.items()):
            code = handle.poll()
            if code is None:
                continue
            del self.running[name]
            seconds = time.monotonic() - began
            if code == 0 and part.done:
                self.finished.add(name)
                self.took.setdefault(_sort(part), []).append(seconds)
                say(f"[{len(self.finished)} of {len(self.parts)}] {part.name}: {duration(seconds)}{self._left()}")
            else:
                self.failed.append(part)
                say(f"{part.name} FAILED: {_last_line(part.folder)}")
            self.told = time.monotonic()

    def _tell(self) -> None:
        if time.monotonic() - self.told < TELL_EVERY:
            return
        self.told = time.monotonic()
        doing = "; ".join(f"{part.name} ({_last_line(part.folder)})" for part, _, _ in self.running.values())
        say(f"    {doing}{self._left()}")

    def _left(self) -> str:
        """``; about 12:05 left``, once a part has told how long one takes."""
        known = [value for values in self.took.values() for value in values]
        if not known or not (self.waiting or self.running):
            return ""

        def expected(part: Part) -> float:
            values = self.took.get(_sort(part)) or known
            return sum(values) / len(values)

        now = time.monotonic()
        rest = sum(map(expected, self.waiting))
        rest += sum(max(0.0, expected(part) - (now - began)) for part, _, began in self.running.values())
        return f"; about {clock(rest / self.jobs)} left"


def _sort(part: Part) -> str:
    """Parts of one sort take about as long as each other."""
    return str(part.row.get("setting", part.kind))


def _last_line(folder: Path) -> str:
    try:
        lines = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return "there is none"
    return next((" ".join(line.split()) for line in reversed(lines) if line.strip()), "there is none")
