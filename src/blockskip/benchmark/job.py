"""The whole of ``blockskip benchmark``: parts, their results as lines, the table, the figures."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockskip.benchmark import figures
from blockskip.benchmark.instruments import encoder_names, open_instruments
from blockskip.benchmark.model import Model, open_for
from blockskip.benchmark.parts import Part, parts
from blockskip.benchmark.processes import cores, do
from blockskip.benchmark.request import Request, checked
from blockskip.benchmark.settings import Setting, chosen
from blockskip.benchmark.subjects import Subject, subjects
from blockskip.benchmark.table import Table, read_rows
from blockskip.errors import UserError
from blockskip.progress import say
from blockskip.run import prepare
from blockskip.settings import from_flat
from blockskip.store.files import write_atomically

#: Number of a line's layout.
FORMAT = 1


@dataclass(frozen=True)
class Outcome:
    """What a benchmark came to.

    Args:
        finished: every row is there; else the time limit came first.
        text: the table for a terminal; empty while no row is there.
        results: the file of lines.
    """

    finished: bool
    text: str
    results: Path


def benchmark(request: Request, jobs: int | None = None, minutes: float | None = None) -> Outcome:
    """Train and measure every setting on every subject; an interrupted benchmark goes on when called again.

    Args:
        jobs: trainings side by side; None: two on a CPU with two cores or more, else one.
        minutes: the time limit; None: none.

    Raises:
        UserError: something that was given cannot be used; nothing was trained.
        RunError: a row failed; all others are there.
    """
    checked(request)
    settings, found = chosen(request.settings), subjects(request)
    model = open_for(request)
    open_instruments(request, model.device)  # what is missing is missed now rather than after the trainings
    _check(model, settings, found)
    todo = parts(model, settings, found)
    side_by_side = jobs or (2 if model.device.type == "cpu" and cores() > 1 else 1)
    results = request.folder / "results.jsonl"
    try:
        finished = do(todo, side_by_side, None if minutes is None else 60 * minutes)
    finally:
        write_results(todo, results)
    text = write_table(results, todo)
    if not finished:
        left = sum(not part.done for part in todo)
        say(f"Stopped at the time limit with {left} of {len(todo)} parts left; the same command goes on.")
    if "mobilenet" not in encoder_names(request) and not request.encoders:
        say('The second encoder is missing; pip install "dit-blockskip[benchmark]" brings it.')
    return Outcome(finished, text, results)


def _check(model: Model, settings: list[Setting], found: list[Subject]) -> None:
    """Whether every run could begin.

    Raises:
        UserError: of all that could not.
    """
    from blockskip.benchmark.trained import configured

    problems: list[str] = []
    for setting in settings:
        for subject in found if setting is settings[0] else found[:1]:
            values = configured(model, setting, subject, model.request.seeds[0])
            try:
                prepare(from_flat({**values, "output": str(model.request.folder / "runs" / setting.name)}))
            except UserError as error:
                problems += [f"{setting.name}: {problem}" for problem in error.problems]
    if problems:
        raise UserError(dict.fromkeys(problems))


def write_results(todo: list[Part], path: Path) -> None:
    """Write a line for each row that is there."""
    lines = []
    for part in todo:
        found = part.result() if part.kind != "others" else None
        if found is not None:
            lines.append(json.dumps({"format": FORMAT, **part.row, **found}))
    text = "".join(f"{line}\n" for line in lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_table(results: Path, todo: list[Part] | None = None) -> str:
    """Write ``table.md``, the plots and the contact sheets beside a file of lines; returns the table as text.

    Args:
        todo: the parts, whose pictures go onto the contact sheets; None leaves those out.
    """
    table = Table.of(read_rows(results))
    if not table.names:
        return ""
    folder = results.parent
    document = table.markdown()
    write_atomically(folder / "table.md", lambda path: path.write_text(document, encoding="utf-8"))
    figures.memory(folder / "memory.png", table)
    figures.steps(folder / "steps.png", table)
    if todo is not None:
        sheets(folder, todo)
    return table.text()


def sheets(folder: Path, todo: list[Part]) -> None:
    """One contact sheet a subject: a row for each setting, the same prompts and seed along a column."""
    by_subject: dict[str, list[tuple[str, Path]]] = {}
    prompts: dict[str, list[str]] = {}
    for part in todo:
        if part.kind == "others" or not part.done or part.row.get("seed", 0) != todo[-1].row["seed"]:
            continue
        where = part.folder / ("pictures" if part.kind == "base" else f"drawn-{part.task['drawing']}/end")
        by_subject.setdefault(part.row["subject"], []).append((part.row["title"], where))
        prompts[part.row["subject"]] = part.row["prompts"]
    heldout: dict[str, Any] = {part.row["subject"]: part.folder / "heldout" for part in todo if part.kind == "base"}
    for subject, rows in by_subject.items():
        figures.sheet(folder / "sheets" / f"{subject}.png", rows, prompts[subject], heldout[subject])
