"""What phases take, told as they end: beside the plan, and loudly where it is more than the budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from blockskip.measure import Peaks, PhaseRecord
from blockskip.planner.budget import Budget
from blockskip.progress import say
from blockskip.report.content import Overrun
from blockskip.run.advice import DISK
from blockskip.units import change, size

#: How far a phase may exceed its budget before it is told, and grow before it is told again: plans do not know what the
#: allocators keep.
TOLERANCE = 0.05


class Watch:
    """Tells what each phase took, once and again when it has grown.

    Args:
        planned: peaks by phase; without those that could not be planned.
        budget: what each phase, and the disk, may take.
        advice: what to try for a phase, or for ``advice.DISK``.
    """

    def __init__(self, planned: Mapping[str, Peaks], budget: Budget, advice: Callable[[str], str]) -> None:
        self.planned = dict(planned)
        self._budget, self._advice = budget, advice
        self._told: dict[str, PhaseRecord] = {}
        self._warned: dict[tuple[str, str], int] = {}

    def known(self, records: Iterable[PhaseRecord], planned: Mapping[str, Peaks]) -> None:
        """What earlier processes of the run took and were planned to take is told no more, and counts."""
        for record in records:
            self._told[record.name] = record
            before = planned.get(record.name)
            if before is not None:
                now = self.planned.get(record.name)
                self.planned[record.name] = before if now is None else now.merged(before)

    def ended(self, record: PhaseRecord) -> None:
        """A phase has ended."""
        before = self._told.get(record.name)
        if before is None or _grown(record, before):
            say(compared(record, self.planned.get(record.name)))
            self._told[record.name] = record if before is None else before.merged(record)
        self._warn(self.overruns([record]))

    def written(self, disk_bytes: int) -> None:
        """The run has written so much."""
        self._warn(self.overruns([], disk_bytes))

    def overruns(self, records: Iterable[PhaseRecord], disk_bytes: int = 0) -> list[Overrun]:
        """What took more than its budget and the tolerance."""
        found = [
            Overrun(record.name, kind, measured, allowed, self._advice(record.name))
            for record in records
            for kind, measured, allowed in (
                ("device memory", record.device_allocated_peak, self._budget.device),
                ("memory" if self._budget.device is None else "host memory", record.host_peak, self._budget.host),
            )
            if allowed is not None and measured > (1 + TOLERANCE) * allowed
        ]
        allowed = self._budget.disk
        if allowed is not None and disk_bytes > (1 + TOLERANCE) * allowed:
            found.append(Overrun("the run", "disk space", disk_bytes, allowed, self._advice(DISK)))
        return found

    def _warn(self, overruns: Iterable[Overrun]) -> None:
        for overrun in overruns:
            place = overrun.phase, overrun.kind
            if overrun.measured > (1 + TOLERANCE) * self._warned.get(place, 0):
                self._warned[place] = overrun.measured
                say(f"WARNING: {overrun}")


def compared(record: PhaseRecord, planned: Peaks | None) -> str:
    """``train: 612 MiB measured, 598 MiB planned (+2%)``; of an accelerator its memory first, then the host's."""
    on_device = record.device_reserved_peak and (planned is None or planned.device)
    host = _beside(record.host_peak, planned and planned.host)
    if not on_device:
        return f"{record.name}: {host}"
    device = _beside(record.device_allocated_peak, planned and planned.device)
    return f"{record.name}: {device}, {size(record.device_reserved_peak)} reserved on the device; on the host {host}"


def _beside(measured: int, planned: int | None) -> str:
    text = f"{size(measured)} measured"
    if planned is None:
        return text
    return f"{text}, {size(planned)} planned" + (f" ({change(measured, planned)})" if planned else "")


def _grown(record: PhaseRecord, before: PhaseRecord) -> bool:
    pairs = (
        (record.host_peak, before.host_peak), (record.device_allocated_peak, before.device_allocated_peak)
    )  # fmt: skip
    return any(now > (1 + TOLERANCE) * then and now - then > 2**20 for now, then in pairs)
