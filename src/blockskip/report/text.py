"""The figures of a report as a table for the terminal."""

from __future__ import annotations

import textwrap

from blockskip.report.content import Report
from blockskip.report.table import headlines, notes, table
from blockskip.report.wording import shorten, width

WIDTH = 100
GAP = "  "


def render_text(report: Report) -> str:
    """Title, table and notes; no line is wider than 100 columns. More models than fit come in several tables."""
    lines = [shorten(report.title, WIDTH)]
    if report.subtitle:
        lines.append(shorten(report.subtitle, WIDTH))
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
    best = headlines(report)
    if best:
        lines.append("")
        lines += [shorten(f"{item.figure} {item.label} ({item.note})", WIDTH) for item in best]
    for note in notes(report):
        lines += ["", *textwrap.wrap(note, WIDTH)]
    return "\n".join(lines) + "\n"


def _parts(widths: list[int], room: int) -> list[range]:
    """Runs of columns that fit beside the labels, at least one column each."""
    parts, start, taken = [], 0, 0
    for index, column in enumerate(widths):
        if index > start and taken + column + len(GAP) > room:
            parts.append(range(start, index))
            start, taken = index, 0
        taken += column + len(GAP)
    return [*parts, range(start, len(widths))] if widths else []
