"""Peak memory and time of each phase, with private and mapped bytes told apart."""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

#: Seconds between two samples of the process's memory. On Linux a sample takes 3 microseconds, with the thread's
#: wake-up 0.1-0.3 ms, so that training is slowed by less than 1%. (``/proc/self/statm`` holds counters;
#: ``smaps_rollup`` walks the page tables: 1 ms for 2 GB, 5% of a core.)
INTERVAL = 0.02


@dataclass(frozen=True)
class PhaseRecord:
    """What one phase took. All sizes are bytes; host sizes are above the process after its imports.

    Args:
        name: the phase.
        seconds: wall-clock time.
        host_private_peak: peak of anonymous memory: what only ending the process or freeing gives back.
        host_mapped_peak: peak of resident pages of files (weights that are mapped): the system can drop them. Linux
            only; elsewhere it is 0 and everything resident counts as private.
        device_allocated_peak: peak of tensors on the accelerator; 0 on a CPU, where device and host are one pool.
        device_reserved_peak: peak of what the allocator holds there (the driver shows this plus its own context).
        host_peak: peak of private and mapped together, at most their sum; by default the sum, an upper bound.
    """

    name: str
    seconds: float
    host_private_peak: int
    host_mapped_peak: int
    device_allocated_peak: int = 0
    device_reserved_peak: int = 0
    host_peak: int = -1

    def __post_init__(self) -> None:
        if self.host_peak < 0:
            object.__setattr__(self, "host_peak", self.host_private_peak + self.host_mapped_peak)

    def merged(self, other: PhaseRecord) -> PhaseRecord:
        """One record of two stretches of the same phase: seconds add, peaks are the larger ones."""
        largest = {
            field.name: max(getattr(self, field.name), getattr(other, field.name))
            for field in dataclasses.fields(self)[2:]
        }
        return PhaseRecord(self.name, self.seconds + other.seconds, **largest)


@dataclass(frozen=True)
class Peaks:
    """What a phase was planned to take at most, in bytes.

    Args:
        host: host memory above the process after its imports, private and mapped together; where device and host are
            one memory, of both.
        device: tensors on the device; 0 where device and host are one memory.
    """

    host: int
    device: int = 0

    def merged(self, other: Peaks) -> Peaks:
        """The larger figure of each."""
        return Peaks(max(self.host, other.host), max(self.device, other.device))


def to_json(records: Iterable[PhaseRecord]) -> str:
    """The records as a JSON list."""
    return json.dumps([dataclasses.asdict(record) for record in records])


def from_json(text: str) -> list[PhaseRecord]:
    """The records of ``to_json``.

    Raises:
        ValueError: the text is not such a list.
    """
    try:
        return [PhaseRecord(**entry) for entry in json.loads(text)]
    except TypeError as error:
        raise ValueError(f"these are no phase records: {error}") from None


_statm = (-1, -1)  # process and open file


def host_memory() -> tuple[int, int]:
    """(private, mapped) bytes of this process that are in memory now.

    Linux: anonymous pages, and pages of files and shared memory. Elsewhere: everything resident, and 0.
    """
    if sys.platform == "linux":
        global _statm
        if _statm[0] != os.getpid():  # opened once; a forked process has its own
            _statm = os.getpid(), os.open("/proc/self/statm", os.O_RDONLY)
        _, resident, shared, _ = os.pread(_statm[1], 256, 0).split(maxsplit=3)
        return (int(resident) - int(shared)) * mmap.PAGESIZE, int(shared) * mmap.PAGESIZE
    import psutil

    return int(psutil.Process().memory_info().rss), 0


def _highest_ever() -> int:
    """The kernel's own record of this process's peak of resident memory, in bytes; 0 where it keeps none."""
    if sys.platform == "linux":
        with open("/proc/self/status", "rb") as stream:
            for line in stream:
                if line.startswith(b"VmHWM:"):
                    return int(line.split()[1]) * 1024
    return 0


class _Open:
    """A phase that is running."""

    def __init__(self, name: str) -> None:
        self.name, self.began, self.highest_before = name, time.perf_counter(), _highest_ever()
        self.private = self.mapped = self.total = self.allocated = self.reserved = 0


class Meter:
    """Measures the phases of a run.

    A thread reads the process's memory every 20 ms while a phase is open, so a peak shorter than that can be missed; if
    the phase set the process's record, the kernel's own figure is taken, and what the thread had missed counts as
    private. CUDA's peaks are exact.

    Args:
        device: where the model runs.
        ended: called with what a phase took this time, whenever one has ended without an error.
    """

    def __init__(self, device: torch.device, ended: Callable[[PhaseRecord], None] | None = None) -> None:
        self._device, self._ended = device, ended
        self._last: PhaseRecord | None = None
        self._lock = threading.Lock()
        self._open: list[_Open] = []
        self._latest = ""
        self._records: dict[str, PhaseRecord] = {}
        if device.type == "cuda":
            torch.cuda.init()
        self.baseline()

    def baseline(self) -> None:
        """Remembers what the process holds now; later host figures are above it. Called after the imports."""
        self._private, self._mapped = host_memory()

    @property
    def baseline_bytes(self) -> int:
        """What the process held, private and mapped together, when ``baseline`` was last called."""
        return self._private + self._mapped

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures what runs inside, also when it raises. Phases may be nested and repeated."""
        self._observe()  # what the enclosing phases reached, before CUDA's peaks are reset
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        entry, self._latest = _Open(name), name
        with self._lock:
            self._open.append(entry)
        done = threading.Lock()  # waiting for a lock is half the price of waiting for an event
        done.acquire()
        if len(self._open) == 1:
            sampler = threading.Thread(target=self._sample, args=(done,), name="blockskip-meter", daemon=True)
            sampler.start()
        self._observe()
        try:
            yield
        finally:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            seconds = time.perf_counter() - entry.began
            self._observe()
            done.release()
            if len(self._open) == 1:
                sampler.join()
            with self._lock:
                self._open.remove(entry)
            self._last = self._close(entry, seconds)
        if self._ended is not None:
            self._ended(self._last)

    @property
    def latest(self) -> str:
        """The name of the phase that was entered last."""
        return self._latest

    @property
    def last(self) -> PhaseRecord | None:
        """What the phase that ended last took this time, also when it raised; None before the first."""
        return self._last

    def records(self) -> list[PhaseRecord]:
        """One record of each phase so far, in the order in which they first ended."""
        return list(self._records.values())

    def merge(self, records: Iterable[PhaseRecord]) -> None:
        """Adds records of an earlier process, of the run that this one continues."""
        for record in records:
            before = self._records.get(record.name)
            self._records[record.name] = record if before is None else before.merged(record)

    def _sample(self, done: threading.Lock) -> None:
        while not done.acquire(timeout=INTERVAL):
            self._observe(sampling=True)

    def _observe(self, sampling: bool = False) -> None:
        private, mapped = host_memory()
        private, mapped = max(0, private - self._private), max(0, mapped - self._mapped)
        allocated = reserved = 0
        if self._device.type == "cuda" and not sampling:  # its peaks are exact: the ends are enough
            allocated = torch.cuda.max_memory_allocated(self._device)
            reserved = torch.cuda.max_memory_reserved(self._device)
        elif self._device.type == "mps":  # keeps no peaks: sampled like the host
            allocated, reserved = torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory()
        with self._lock:
            for entry in self._open:
                entry.private, entry.mapped = max(entry.private, private), max(entry.mapped, mapped)
                entry.total = max(entry.total, private + mapped)
                entry.allocated, entry.reserved = max(entry.allocated, allocated), max(entry.reserved, reserved)

    def _close(self, entry: _Open, seconds: float) -> PhaseRecord:
        highest = _highest_ever()
        if highest > entry.highest_before:
            missed = max(0, highest - self.baseline_bytes - entry.total)
            entry.total, entry.private = entry.total + missed, entry.private + missed
        record = PhaseRecord(
            entry.name, seconds, entry.private, entry.mapped, entry.allocated, entry.reserved, entry.total
        )
        self.merge([record])
        return record
