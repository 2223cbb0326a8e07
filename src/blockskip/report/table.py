"""The figures of a report as rows of text, for the page and for the terminal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from blockskip.measure import PhaseRecord
from blockskip.report.content import Column, Report, RunFacts
from blockskip.report.wording import shorten
from blockskip.units import change, count, duration, size

NONE = "-"
#: What the figures of memory mean; shown below either table.
MEMORY_NOTE = (
    "Host memory: peak above the process after its imports, and in brackets its private part and its mapped part "
    "(pages of weight files, which the system can drop). The two may peak at different times."
)
DEVICE_NOTE = "Device memory: peak of tensors, and in brackets what the allocator reserved for them."
FIDELITY_NOTE = (
    "Subject fidelity: mean cosine of image features between drawn pictures and pictures of the subject that were kept "
    "back. Floor: the base model. Ceiling: real pictures among themselves."
)


@dataclass(frozen=True)
class Row:
    """A label and one text for each column; ``total`` rows sum up the ones above."""

    label: str
    cells: list[str]
    total: bool = False


@dataclass(frozen=True)
class Group:
    """Rows that belong together."""

    title: str
    rows: list[Row]


@dataclass(frozen=True)
class Headline:
    """A figure that is shown large: ``412 MiB``, ``peak memory``, ``plain LoRA: 900 MiB``."""

    figure: str
    label: str
    note: str


def table(report: Report) -> list[Group]:
    """All groups that hold any figure; none for a report of pictures only."""
    groups = [
        Group("Model", _model(report)),
        *_memory(report),
        Group("Time", _time(report)),
        Group("Disk", _of_runs(report, "Features, text and latents", lambda facts: size(facts.disk_bytes))),
        Group("Subject fidelity", _fidelity(report)),
    ]
    return [group for group in groups if group.rows]


def notes(report: Report) -> list[str]:
    """Sentences that say what the figures of the table mean."""
    found = []
    if report.phases:
        found.append(MEMORY_NOTE)
        baselines = [facts.baseline_bytes for _, facts in report.runs if facts.baseline_bytes]
        if baselines:
            found[0] += f" The process itself took {size(max(baselines))}."
    if any(facts.on_device for _, facts in report.runs):
        found.append(DEVICE_NOTE)
    if any(column.fidelity for column in report.columns):
        found.append(FIDELITY_NOTE)
    return found


def headlines(report: Report) -> list[Headline]:
    """The figures of the last run, each beside the run before it if there is one."""
    if not report.runs:
        return []
    column, facts = report.runs[-1]
    other = report.runs[-2] if len(report.runs) > 1 else None

    def beside(figure: Callable[[RunFacts], float], text: Callable[[float], str], alone: str) -> str:
        if other is None:
            return alone
        return f"{shorten(other[0].name, 30)}: {text(figure(other[1]))}, here {change(figure(facts), figure(other[1]))}"

    def peak(run: RunFacts) -> int:
        return run.device_peak if facts.on_device else run.host_peak

    share = 100 * facts.skipped_parameters / max(1, facts.skipped_parameters + facts.kept_parameters)
    found = []
    if facts.phases:
        label = "peak device memory" if facts.on_device else "peak memory"
        highest = max(
            facts.phases, key=lambda phase: phase.device_reserved_peak if facts.on_device else phase.host_peak
        )
        note = beside(peak, lambda value: size(int(value)), "the highest of all phases")
        found.append(Headline(size(peak(facts)), f"{label}, in {highest.name}", note))
    found.append(
        Headline(
            f"{share:.0f}%",
            "of the weights skipped",
            f"{facts.skipped_blocks} of {facts.num_blocks} blocks not in memory",
        )
    )
    found.append(
        Headline(
            duration(facts.seconds_total),
            "for the whole run",
            beside(lambda run: run.seconds_total, duration, f"{facts.steps} steps"),
        )
    )
    if column.fidelity is not None:
        found.append(_fidelity_headline(column, other))
    return found


def _fidelity_headline(column: Column, other: tuple[Column, RunFacts] | None) -> Headline:
    fidelity = column.fidelity
    assert fidelity is not None
    theirs = other[0].fidelity if other else None
    if fidelity.share is None:
        note = f"{shorten(other[0].name, 30)}: {theirs.value:.3f}" if other and theirs else "1 is the same picture"
        return Headline(f"{fidelity.value:.3f}", "subject fidelity", note)
    note = "0% is the base model, 100% a real picture"
    if other and theirs and theirs.share is not None:
        note = f"{shorten(other[0].name, 30)}: {100 * theirs.share:.0f}%; 100% is a real picture"
    return Headline(f"{100 * fidelity.share:.0f}%", "subject fidelity", note)


def _of_runs(report: Report, label: str, text: Callable[[RunFacts], str], total: bool = False) -> list[Row]:
    if not report.runs:
        return []
    return [Row(label, [NONE if column.facts is None else text(column.facts) for column in report.columns], total)]


def _of_phase(report: Report, name: str, text: Callable[[PhaseRecord], str]) -> list[Row]:
    def of(facts: RunFacts) -> str:
        return next((text(record) for record in facts.phases if record.name == name), NONE)

    rows = _of_runs(report, name, of)
    return [row for row in rows if any(cell != NONE for cell in row.cells)]


def _model(report: Report) -> list[Row]:
    def skipped(facts: RunFacts) -> str:
        front, tail = facts.split or (0, 0)
        start, stop = facts.inner
        if stop:
            return f"{facts.skipped_blocks} of {facts.num_blocks} ({start} to {stop - 1})"
        if not front + tail:
            return f"0 of {facts.num_blocks}"
        at_front, at_tail = ("" if what == "skipped" else f", {what}" for what in (facts.front, facts.tail))
        return f"{facts.skipped_blocks} of {facts.num_blocks} ({front} front{at_front}, {tail} tail{at_tail})"

    return [
        *_of_runs(report, "Blocks skipped", skipped),
        *_of_runs(report, "Parameters skipped", lambda facts: count(facts.skipped_parameters)),
        *_of_runs(report, "Parameters kept", lambda facts: count(facts.kept_parameters)),
        *_of_runs(report, "Parameters trained", lambda facts: count(facts.trained_parameters)),
        *_of_runs(report, "Resolution (full)", lambda facts: f"{facts.resolution} px ({facts.full_resolution})"),
        *_of_runs(report, "Optimiser steps", lambda facts: str(facts.steps)),
    ]


def _memory(report: Report) -> list[Group]:
    if not report.phases:
        return []

    def host(record: PhaseRecord) -> str:
        return size(record.host_peak, record.host_private_peak, record.host_mapped_peak)

    def device(record: PhaseRecord) -> str:
        return size(record.device_allocated_peak, record.device_reserved_peak) if record.device_reserved_peak else NONE

    highest = _of_runs(report, "Highest", lambda facts: size(facts.host_peak) if facts.phases else NONE, total=True)
    groups = [
        Group(
            "Peak memory (private + mapped)",
            [row for name in report.phases for row in _of_phase(report, name, host)] + highest,
        )
    ]
    if any(facts.on_device for _, facts in report.runs):
        groups.append(
            Group(
                "Peak device memory (reserved)",
                [row for name in report.phases for row in _of_phase(report, name, device)],
            )
        )
    return groups


def _time(report: Report) -> list[Row]:
    rows = [row for name in report.phases for row in _of_phase(report, name, lambda record: duration(record.seconds))]
    return rows + _of_runs(report, "Whole run", lambda facts: duration(facts.seconds_total), total=True)


def _fidelity(report: Report) -> list[Row]:
    found = [column.fidelity for column in report.columns]
    rows = [Row("Cosine to kept-back pictures", [NONE if item is None else f"{item.value:.3f}" for item in found])]
    for label, name in (("Floor: base model", "floor"), ("Ceiling: real pictures", "ceiling")):
        ends = [None if item is None else getattr(item, name) for item in found]
        rows.append(Row(label, [NONE if end is None else f"{end:.3f}" for end in ends]))
    shares = [None if item is None else item.share for item in found]
    rows.append(Row("Share of the way", [NONE if share is None else f"{100 * share:.0f}%" for share in shares], True))
    return [row for row in rows if any(cell != NONE for cell in row.cells)]
