"""The figures of a report as a table for the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from blockskip.report.content import Report
from blockskip.report.planned import HEADINGS, PLANNED_NOTE, Compared, compared, warnings
from blockskip.report.table import headlines, notes, table
from blockskip.report.wording import shorten, width

WIDTH = 100
GAP = "  "


def render_text(report: Report) -> str:
    """Title, table and notes; no line is wider than 100 columns. More models than fit come in several tables."""
    lines = [shorten(report.title, WIDTH)]
    if report.subtitle:
        lines.append(shorten(report.subtitle, WIDTH))
    for sentence in warnings(report):
        lines += ["", *textwrap.wrap(f"WARNING: {sentence}", WIDTH)]
    groups = table(report)
    if groups:
        labels = max(len(row.label) + 2 for group in groups for row in group.rows)
        names = [shorten(column.name, 30) for column in report.columns]
        widths = [
            max(width(names[index]), *(width(row.cells[index]) for group in groups for row in group.rows))
            for index in range(len(names))
        ]
        for part in _parts(widths, WIDTH - labels):

            def line(label: str, cells: list[str], part: range = part) -> str:
                padded = [" " * (widths[index] - width(cells[index])) + cells[index] for index in part]
                return GAP.join([label + " " * (labels - width(label)), *padded]).rstrip()

            lines += ["", line("", names), "-" * (labels + sum(widths[index] + len(GAP) for index in part))]
            for group in groups:
                lines.append(group.title)
                lines += [line("  " + row.label, row.cells) for row in group.rows]
    beside = compared(report)
    lines += _beside(beside) if beside else []
    best = headlines(report)
    if best:
        lines.append("")
        lines += [shorten(f"{item.figure} {item.label} ({item.note})", WIDTH) for item in best]
    for note in [*notes(report), *([PLANNED_NOTE] if beside else [])]:
        lines += ["", *textwrap.wrap(note, WIDTH)]
    return "\n".join(lines) + "\n"


def _beside(tables: list[Compared]) -> list[str]:
    """Planned and measured memory: one heading, and the phases of each run below its name."""
    rows = [HEADINGS, *(row[1:] for one in tables for row in one.rows)]
    widths = [max(len(row[index]) for row in rows) for index in range(len(HEADINGS))]
    labels = max(len(row[0]) + 2 for one in tables for row in one.rows)

    def line(label: str, cells: Sequence[str]) -> str:
        return GAP.join([label.ljust(labels), *(cell.rjust(size) for cell, size in zip(cells, widths, strict=True))])

    lines = ["", line("", HEADINGS), "-" * (labels + sum(widths) + len(GAP) * len(widths))]
    for one in tables:
        lines.append(shorten(one.title, WIDTH))
        lines += [line("  " + row[0], row[1:]) for row in one.rows]
    return lines


def _parts(widths: list[int], room: int) -> list[range]:
    """Runs of columns that fit beside the labels, at least one column each."""
    parts, start, taken = [], 0, 0
    for index, column in enumerate(widths):
        if index > start and taken + column + len(GAP) > room:
            parts.append(range(start, index))
            start, taken = index, 0
        taken += column + len(GAP)
    return [*parts, range(start, len(widths))] if widths else []
