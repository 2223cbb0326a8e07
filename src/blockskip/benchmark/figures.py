"""The pictures of a benchmark: fidelity against memory and against steps, and a contact sheet for each subject."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageFont

from blockskip.benchmark.settings import REFERENCE
from blockskip.benchmark.table import Table
from blockskip.store.files import write_atomically

#: Okabe and Ito's colours, which colour-blind people tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#8a8a00")
DASHES = ("-", "--", ":")
MIB = 2**20


def memory(path: Path, table: Table) -> None:
    """Subject fidelity and held-out loss of each setting against the peak of its training; bars are 95% intervals.

    The bars are of the difference from plain LoRA, which has none.

    Args:
        path: a PNG file.
    """
    panels = _panels(table)
    figure = Figure(figsize=(5.2 * len(panels), 4.4), dpi=130, layout="constrained")
    for axes, (measure, label) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for number, name in enumerate(table.names):
            found = table.lines.measured(measure, name)
            if found is None:
                continue
            x, colour = table.memory(name) / MIB, COLOURS[number % len(COLOURS)]
            if found.low is not None and found.high is not None and found.difference is not None:
                bars = [[found.difference - found.low], [found.high - found.difference]]
                axes.errorbar(x, found.mean, yerr=np.maximum(bars, 0), color=colour, capsize=2, linewidth=1)
            axes.plot(x, found.mean, "s" if name == REFERENCE else "o", color=colour, markersize=6)
            axes.annotate(table.title(name), (x, found.mean), textcoords="offset points", xytext=(6, 4), fontsize=7)
        axes.margins(x=0.2, y=0.1)
        _dress(axes, "peak memory of the training (MiB)", label)
    _save(figure, path)


def steps(path: Path, table: Table) -> None:
    """Held-out loss and subject fidelity against optimiser steps, the mean of the subjects (the paper's convergence).

    Args:
        path: a PNG file.
    """
    panels = _panels(table)
    figure = Figure(figsize=(5.6 * len(panels), 4.2), dpi=130, layout="constrained")
    rows = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (measure, label) in zip(rows, panels, strict=True):
        for number, name in enumerate(table.names):
            points = curve(table, measure, name)
            if points:
                turn, place = divmod(number, len(COLOURS))
                x, y = zip(*points, strict=True)
                axes.plot(x, y, DASHES[turn % 3], color=COLOURS[place], marker=".", label=table.title(name))
        _dress(axes, "optimiser steps", label)
    rows[-1].legend(frameon=False, fontsize=7)
    _save(figure, path)


def curve(table: Table, measure: str, name: str) -> list[tuple[int, float]]:
    """(step, mean over the runs) of a setting, from the base model at step 0 on, where all runs have the step.

    Args:
        measure: ``heldout:SIZE`` or ``share:ENCODER:KIND``.
    """
    kind, *about = measure.split(":")
    by_step: dict[int, list[float]] = {0: []}
    rows = table.lines.runs[name]
    for row in rows.values():
        by_step[0].append(0.0)
        for point in row["curve"]:
            value: float | None
            if kind == "heldout":
                value = table.lines.heldout_share(row, about[0], point["heldout"][about[0]])
            else:
                encoder, references = about
                shares = table.lines.fidelity_share(
                    row["subject"], encoder, references, point["fidelity"][encoder][references]
                )
                value = None if shares is None else float(np.mean(shares))
            if value is not None:
                by_step.setdefault(point["step"], []).append(value)
    return [(step, float(np.mean(values))) for step, values in sorted(by_step.items()) if len(values) == len(rows)]


def sheet(path: Path, rows: Sequence[tuple[str, Path]], prompts: Sequence[str], real: Path, side: int = 112) -> None:
    """The first picture of every prompt, a row for each setting, and real pictures on top.

    Args:
        path: a PNG file.
        rows: title, and folder of ``00-0.png``.
        prompts: heads of the columns.
        real: folder of the kept-back pictures.
        side: pixels of each.
    """
    left, header, gap = 150, 46, 4
    lines = [("real, kept back", sorted(real.glob("*.png"))[: len(prompts)])]
    lines += [(title, [folder / f"{number:02d}-0.png" for number in range(len(prompts))]) for title, folder in rows]
    height = 2 * header + len(lines) * (side + gap)
    image = Image.new("RGB", (left + len(prompts) * (side + gap), height), "white")
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(11)
    top = 0
    for number, (title, files) in enumerate(lines):
        if number == 1:
            for column, prompt in enumerate(prompts):
                words = _folded(prompt, 19)
                pen.multiline_text((left + column * (side + gap), top + 2), words, fill="black", font=font, spacing=1)
            top += header
        pen.multiline_text((4, top + side // 2 - 8), _folded(title, 24), fill="black", font=font, spacing=1)
        for column, file in enumerate(files):
            if file.is_file():
                with Image.open(file) as picture:
                    fitted = picture.convert("RGB").resize((side, side), Image.Resampling.LANCZOS)
                image.paste(fitted, (left + column * (side + gap), top))
        top += side + gap
    image = image.crop((0, 0, image.width, top))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda temporary: image.save(temporary, format="PNG"))


def _panels(table: Table) -> list[tuple[str, str]]:
    """(measure, label of its axis) of what both plots show, as far as any row has it."""
    wanted = [(f"share:{name}:drawable", f"subject fidelity ({name})") for name in table.lines.encoders[:1]]
    wanted += [(f"heldout:{side}", f"held-out loss at {side}, share of LoRA's") for side in table.lines.sizes[:1]]
    known = {measure.name for measure in table.measures}
    return [pair for pair in wanted if pair[0] in known] or wanted[:1]


def _folded(text: str, width: int) -> str:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) + 1 > width and lines[-1]:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines[:4])


def _dress(axes: Axes, x: str, y: str) -> None:
    axes.set(xlabel=x, ylabel=y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(linewidth=0.6, alpha=0.5)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png", metadata={"Software": None}))
