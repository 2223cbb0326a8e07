"""What a report holds. Others fill it in; the page and the terminal table are two views of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from PIL import Image

from blockskip.evaluation.fidelity import Fidelity
from blockskip.measure import Peaks, PhaseRecord
from blockskip.units import change, size

#: Colours of the runs; number 0 is kept for a column that was not trained (the base model).
SERIES = 6


@dataclass(frozen=True)
class Overrun:
    """Something that took clearly more than its budget.

    Args:
        phase: what took it.
        kind: of what: ``memory``, ``device memory``, ``host memory``, ``disk space``.
        measured, budget: bytes.
        advice: what to try.
    """

    phase: str
    kind: str
    measured: int
    budget: int
    advice: str

    def __str__(self) -> str:
        took = f"{self.phase} took {size(self.measured)} of {self.kind}"
        return f"{took}, its budget is {size(self.budget)} ({change(self.measured, self.budget)}). Try {self.advice}."


@dataclass(frozen=True)
class RunFacts:
    """What one training run was and took.

    Args:
        skipped_parameters: numbers in the skipped blocks, which are not in memory while training.
        kept_parameters: numbers of the frozen transformer that are.
        trained_parameters: numbers that were trained.
        phases: time and memory, in the order of the run.
        disk_bytes: largest size of what was stored on disk for the run.
        steps: optimiser steps.
        seconds_total: of all phases together.
        split: (front, tail) blocks without LoRA; None or (0, 0) if every block was trained.
        num_blocks: all blocks of the transformer.
        resolution, full_resolution: pixels trained on, and pixels the pictures were first scaled to.
        config_toml: the resolved settings; paths of this machine are taken out before they are shown.
        baseline_bytes: what the process held after its imports; the phases' host figures are above it.
        front, tail: what was done with those: skipped, streamed (run, block by block from the file) or kept (run, in
            memory).
        inner: (start, stop) of a run of blocks that was skipped inside; (0, 0) is none.
        planned: peaks by phase as they were planned before the run.
        overruns: what took clearly more than its budget.
    """

    skipped_parameters: int
    kept_parameters: int
    trained_parameters: int
    phases: list[PhaseRecord]
    disk_bytes: int
    steps: int
    seconds_total: float
    split: tuple[int, int] | None
    num_blocks: int
    resolution: int
    full_resolution: int
    config_toml: str
    baseline_bytes: int | None = None
    front: Literal["skipped", "kept"] = "skipped"
    tail: Literal["skipped", "streamed", "kept"] = "skipped"
    inner: tuple[int, int] = (0, 0)
    planned: dict[str, Peaks] = field(default_factory=dict)
    overruns: list[Overrun] = field(default_factory=list)

    @property
    def on_device(self) -> bool:
        """Whether the run had an accelerator with memory of its own."""
        return any(phase.device_reserved_peak for phase in self.phases)

    @property
    def host_peak(self) -> int:
        """Bytes of the highest phase, private and mapped together."""
        return max((phase.host_peak for phase in self.phases), default=0)

    @property
    def device_peak(self) -> int:
        """Bytes that the allocator held on the device in the highest phase."""
        return max((phase.device_reserved_peak for phase in self.phases), default=0)

    @property
    def skipped_blocks(self) -> int:
        """Blocks that were not in memory, or only while they were run."""
        front, tail = self.split or (0, 0)
        ends = (0 if self.front == "kept" else front) + (0 if self.tail == "kept" else tail)
        return ends + self.inner[1] - self.inner[0]


@dataclass(frozen=True)
class Column:
    """One model in the comparison: the base, plain LoRA, DiT-BlockSkip.

    Args:
        name: its heading.
        images: for each prompt of the report the pictures of its seeds; empty if none were drawn.
        losses: (optimiser step, loss), or None if nothing was trained.
        facts: None if nothing was trained.
        fidelity: None if it was not measured.
    """

    name: str
    images: list[list[Image.Image]] = field(default_factory=list)
    losses: list[tuple[int, float]] | None = None
    facts: RunFacts | None = None
    fidelity: Fidelity | None = None


@dataclass(frozen=True)
class Report:
    """What a run gave, beside the models it is compared with.

    Args:
        title, subtitle: heading of the page.
        subject_pictures: the pictures the subject was learned from.
        prompts: drawn by every column, with the same seeds.
        columns: from left to right.

    Raises:
        ValueError: a column has pictures of another number of prompts.
    """

    title: str
    subtitle: str
    subject_pictures: list[Image.Image]
    prompts: list[str]
    columns: list[Column]

    def __post_init__(self) -> None:
        for column in self.columns:
            if column.images and len(column.images) != len(self.prompts):
                raise ValueError(
                    f'the column "{column.name}" has pictures of {len(column.images)} prompts, '
                    f"the report has {len(self.prompts)}"
                )

    @property
    def runs(self) -> list[tuple[Column, RunFacts]]:
        """The columns that were trained, with their facts."""
        return [(column, column.facts) for column in self.columns if column.facts is not None]

    @property
    def series(self) -> list[int]:
        """The colour number of each column: 0 for one that was not trained, then 1, 2, ... in turn."""
        numbers, used = [], 0
        for column in self.columns:
            trained = column.facts is not None or bool(column.losses)
            numbers.append(1 + used % (SERIES - 1) if trained else 0)
            used += trained
        return numbers

    @property
    def phases(self) -> list[str]:
        """The names of all phases of all runs, each once, in the order of the runs."""
        order: list[str] = []
        for _, facts in self.runs:
            place = 0
            for record in facts.phases:
                if record.name in order:
                    place = order.index(record.name) + 1
                else:
                    order.insert(place, record.name)
                    place += 1
        return order
