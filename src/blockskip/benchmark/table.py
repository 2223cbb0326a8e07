"""The table of a benchmark: a row for each setting, means, and paired differences from plain LoRA with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from blockskip.benchmark.rows import Lines, Measured
from blockskip.benchmark.settings import REFERENCE, SETTINGS
from blockskip.units import duration, size


@dataclass(frozen=True)
class Measure:
    """A column.

    Args:
        name: of ``Lines.values``.
        title: as the table has it.
        digits: after the point.
    """

    name: str
    title: str
    digits: int = 2


@dataclass(frozen=True)
class Table:
    """Everything that is shown, from the lines alone."""

    lines: Lines

    @classmethod
    def of(cls, lines: Lines) -> Table:
        """The table of a file's lines."""
        return cls(lines)

    @property
    def names(self) -> list[str]:
        """The settings, in the order of ``SETTINGS``; names that are not among them come last."""
        order = list(SETTINGS)
        return sorted(self.lines.runs, key=lambda name: order.index(name) if name in order else len(order))

    @property
    def measures(self) -> list[Measure]:
        """The columns that any row has."""
        first, *others = self.lines.encoders or [""]
        found = [Measure(f"heldout:{side}", f"held-out loss, {side.replace('x', ' x ')}") for side in self.lines.sizes]
        found.append(Measure(f"share:{first}:drawable", "subject fidelity"))
        found += [Measure(f"share:{name}:drawable", f"by {name}") for name in others]
        found += [
            Measure(f"cosine:{first}:real", "cosine with real pictures", 3),
            Measure("prompt", "prompt", 3),
            Measure("background", "background"),
            Measure(f"drift:{first}", "drift", 3),
        ]
        return [item for item in found if any(self.lines.measured(item.name, name) for name in self.lines.runs)]

    def title(self, name: str) -> str:
        """Of a setting."""
        return str(next(iter(self.lines.runs[name].values()))["title"])

    def mean(self, name: str, *path: str) -> float:
        """The mean over a setting's runs of a number in what the run took: ``("memory", "train_host")``."""
        values = []
        for row in self.lines.runs[name].values():
            value: Any = row["run"]
            for part in path:
                value = value[part]
            values.append(float(value))
        return float(np.mean(values))

    def memory(self, name: str, which: str = "train") -> float:
        """The largest peak of a setting's runs in bytes.

        Args:
            which: ``train``, of the training alone; ``planned``, what was planned for it, 0 where nothing was;
                ``all``, of any phase.
        """
        on_cpu = next(iter(self.lines.runs[name].values()))["run"]["device"] == "cpu"
        place = "host" if on_cpu else "device"
        where = {"train": f"train_{place}", "planned": f"train_{place}_planned", "all": place}[which]
        return max(float(row["run"]["memory"].get(where, 0)) for row in self.lines.runs[name].values())

    # -- as text ----------------------------------------------------------------------------------------------------

    def columns(self) -> list[str]:
        """The heads of ``rows``."""
        fixed = ["setting", "left out", "px", *(measure.title for measure in self.measures)]
        return [*fixed, "memory, training", "planned", "memory, all", "time"]

    def rows(self) -> list[list[str]]:
        """The cells of means: floor and ceiling first, then each setting."""
        found = []
        for title, which in (("base model", "floor"), ("real pictures", "ceiling")):
            cells = [self._end(measure, which) for measure in self.measures]
            found.append([title, "", "", *cells, "", "", "", ""])
        for name in self.names:
            run = next(iter(self.lines.runs[name].values()))["run"]
            cells = [_number(self.lines.measured(item.name, name), item.digits) for item in self.measures]
            peaks = [int(self.memory(name, which)) for which in ("train", "planned", "all")]
            memory = [size(peak) if peak else "" for peak in peaks]
            pair = f"{_blocks(run['skipped'])} of {run['num_blocks']}"
            side = str(run["config"]["data.resolution"])
            found.append([self.title(name), pair, side, *cells, *memory, duration(self.mean(name, "seconds", "all"))])
        return found

    def differences(self) -> list[list[str]]:
        """The cells of paired differences from plain LoRA, each with its interval."""
        return [
            [self.title(name), *(_difference(self.lines.measured(m.name, name), m.digits) for m in self.measures)]
            for name in self.names
            if name != REFERENCE
        ]

    def markdown(self) -> str:
        """Both tables with what they mean."""
        heads = ["setting", *(measure.title for measure in self.measures)]
        return "\n".join([
            *in_markdown(self.columns(), self.rows()), "", self._counted(), "",
            f"Difference from {self._reference()} on the same subjects, prompts and seeds, with the 95% interval "
            "(bootstrap over subjects, then pictures):", "",
            *in_markdown(heads, self.differences()), "",
        ])  # fmt: skip

    def text(self) -> str:
        """Both tables for a terminal."""
        heads = ["setting", *(measure.title for measure in self.measures)]
        parts = [*_aligned(self.columns(), self.rows()), "", self._counted()]
        if differences := self.differences():
            parts += ["", f"Difference from {self._reference()}, with the 95% interval:", *_aligned(heads, differences)]
        return "\n".join(parts)

    def _reference(self) -> str:
        return SETTINGS[REFERENCE].title

    def _counted(self) -> str:
        counts = {name: len(rows) for name, rows in self.lines.runs.items()}
        subjects = len({subject for rows in self.lines.runs.values() for subject, _ in rows})
        most = max(counts.values())
        sentence = f"{subjects} subject{'s' * (subjects > 1)}, {most} run{'s' * (most > 1)} a setting"
        if fewer := [f"{self.title(name)} {count}" for name, count in counts.items() if count < most]:
            sentence += f" (so far {', '.join(fewer)})"
        return (
            f"{sentence}. Held-out loss and subject fidelity are shares: 0 is the base model, 1 is "
            f"{self._reference()}'s improvement, or real pictures as the autoencoder gives them."
        )

    def _end(self, measure: Measure, which: str) -> str:
        """Floor or ceiling of a column."""
        name, *about = measure.name.split(":")
        if name in ("share", "heldout"):
            return f"{float(which == 'ceiling'):.{measure.digits}f}" if name == "share" or which == "floor" else ""
        values = []
        for row in self.lines.base.values():
            if name == "cosine":
                encoder, kind = about
                given = row["fidelity"] if which == "floor" else row["ceiling"]["fidelity"]
                values.append(np.mean(given[encoder][kind]))
            elif name == "drift":
                values += [0.0] if which == "floor" else []
            elif (found := (row if which == "floor" else row["ceiling"])[name]) is not None:
                values.append(np.mean(found))
        return f"{float(np.mean(values)):.{measure.digits}f}" if values else ""


def _blocks(numbers: Sequence[int]) -> str:
    """``0-2, 9-11``: runs of block numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs) or "none"


def read_rows(path: Path) -> Lines:
    """The lines of a file of results."""
    return Lines.read(path)


def _number(found: Measured | None, digits: int) -> str:
    return "–" if found is None else f"{found.mean:.{digits}f}"


def _difference(found: Measured | None, digits: int) -> str:
    if found is None or found.difference is None:
        return "–"
    if found.low is None or found.high is None:
        return f"{found.difference:+.{digits}f}"
    return f"{found.difference:+.{digits}f} ({found.low:+.{digits}f} to {found.high:+.{digits}f})"


def in_markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def _aligned(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(line[i]) for line in (heads, *rows)) for i in range(len(heads))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in (heads, *rows)]  # fmt: skip
