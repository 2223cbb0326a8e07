"""The report as one web page that holds everything it shows: pictures, drawings and style; no script, no network."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from blockskip.report import figures
from blockskip.report.content import Column, Report
from blockskip.report.pictures import data_uri
from blockskip.report.planned import HEADINGS, PLANNED_NOTE, compared, warnings
from blockskip.report.settings import without_paths
from blockskip.report.table import headlines, notes, table
from blockskip.report.wording import clean, shorten
from blockskip.units import duration, size


@dataclass(frozen=True)
class _Heading:
    """A column as the template shows it."""

    name: str
    full_name: str
    series: int
    trained: bool
    summary: str
    strip: Markup | None
    caption: str
    settings: str


@dataclass(frozen=True)
class _Figure:
    """A drawing with its heading, and a sentence that says how to read it."""

    title: str
    svg: Markup
    reading: str
    runs_only: bool


def render_html(report: Report) -> str:
    """The page. Every text of the report is escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"clean": clean, "together": _together}
    headings = [_heading(column, series) for column, series in zip(report.columns, report.series, strict=True)]
    drawn = any(column.images for column in report.columns)
    return environment.get_template("report.html.j2").render(
        report=report,
        subjects=[data_uri(image) for image in report.subject_pictures],
        headings=headings,
        rows=[
            (
                prompt,
                [
                    [data_uri(image) for image in column.images[index]] if column.images else []
                    for column in report.columns
                ],
            )
            for index, prompt in enumerate(report.prompts)
        ]
        if drawn
        else [],
        headlines=headlines(report),
        groups=table(report),
        notes=notes(report),
        warnings=warnings(report),
        compared=compared(report),
        compared_headings=HEADINGS,
        compared_note=PLANNED_NOTE,
        figures=_figures(report),
    )


def write_report(report: Report, path: Path) -> None:
    """Writes the page to a path; the file appears whole or not at all.

    Raises:
        OSError: the path cannot be written.
    """
    text = render_html(report)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _together(cell: str) -> str:
    """The cell so that a narrow page breaks it before its bracket and nowhere else."""
    return cell.replace(" ", "\N{NO-BREAK SPACE}").replace("\N{NO-BREAK SPACE}(", " (")


def _heading(column: Column, series: int) -> _Heading:
    facts, parts, name = column.facts, [], shorten(column.name, 60)
    if facts is not None:
        if facts.phases:
            parts.append(size(facts.device_peak if facts.on_device else facts.host_peak))
        parts.append(duration(facts.seconds_total))
    if column.fidelity is not None:
        share = column.fidelity.share
        parts.append(f"fidelity {column.fidelity.value:.3f}" if share is None else f"fidelity {100 * share:.0f}%")
    if facts is None:
        return _Heading(name, column.name, series, False, ", ".join(parts), None, "", "")
    front, tail = facts.split or (0, 0)
    start, stop = facts.inner
    trained = f"{facts.num_blocks - front - tail} trained"
    caption = f"all {trained}"
    if stop:
        caption = f"{start} trained, {stop - start} skipped, {facts.num_blocks - stop} trained"
    elif front + tail:
        caption = f"{front} {facts.front} at the front, {trained}, {tail} {facts.tail} at the tail"
    strip = Markup(figures.blocks(facts, series))
    settings = without_paths(facts.config_toml)
    return _Heading(name, column.name, series, True, ", ".join(parts), strip, caption, settings)


def _figures(report: Report) -> list[_Figure]:
    candidates = [
        ("Subject fidelity", figures.fidelity(report), "Longer is closer to the real subject.", False),
        ("Loss", figures.losses(report), "Faint: each step. Strong: running mean.", True),
        ("Peak memory by phase", figures.memory(report), "Strong: private. Whole bar: with mapped weight files.", True),
        ("Peak device memory by phase", figures.device_memory(report), "Strong: tensors. Whole bar: reserved.", True),
        ("Time by phase", figures.seconds(report), "", True),
    ]
    return [_Figure(title, Markup(svg), reading, runs) for title, svg, reading, runs in candidates if svg is not None]
