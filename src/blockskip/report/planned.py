"""What the phases of each run took beside what they were planned to take, and what exceeded its budget."""

from __future__ import annotations

from dataclasses import dataclass

from blockskip.report.content import Report, RunFacts
from blockskip.units import change, size

HEADINGS = ("Planned", "Measured", "Difference")
PLANNED_NOTE = (
    "Planned: counted before the run, on tensors without values. Measured: with what the interpreter and the "
    "allocators keep beside the tensors; on a CPU that may be as much again beside a small model."
)


@dataclass(frozen=True)
class Compared:
    """One memory of one run: ``rows`` are a phase with its planned figure, the measured one and the difference."""

    title: str
    rows: list[tuple[str, str, str, str]]


def compared(report: Report) -> list[Compared]:
    """The runs that were planned; of one with an accelerator, its memory and then the host's."""
    found = []
    for column, facts in report.runs:
        device = any(peaks.device for peaks in facts.planned.values())
        if device:
            found.append(Compared(f"{column.name}, device memory", _rows(facts, device=True)))
        found.append(Compared(f"{column.name}, {'host memory' if device else 'memory'}", _rows(facts, device=False)))
    return [one for one in found if one.rows]


def warnings(report: Report) -> list[str]:
    """A sentence for everything that took clearly more than its budget."""
    several = len(report.runs) > 1
    return [
        f"{column.name}: {overrun}" if several else str(overrun)
        for column, facts in report.runs
        for overrun in facts.overruns
    ]


def _rows(facts: RunFacts, *, device: bool) -> list[tuple[str, str, str, str]]:
    found = []
    for record in facts.phases:
        peaks = facts.planned.get(record.name)
        if peaks is not None:
            planned = peaks.device if device else peaks.host
            measured = record.device_allocated_peak if device else record.host_peak
            difference = change(measured, planned) if planned else "-"
            found.append((record.name, size(planned), size(measured), difference))
    return found
