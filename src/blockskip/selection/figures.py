"""The pictures of a selection: curves of both sweeps and of the window, block by noise level, and what was drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageFont

from blockskip.evaluation.intervals import Values
from blockskip.method.selection import Masked
from blockskip.selection.result import Sweep
from blockskip.store.files import write_atomically

#: Okabe and Ito's colours, which colour-blind people tell apart.
BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#6a6a6a"
TITLES = {"pictures": "distance of the pictures (Eq. 2)", "velocity": "relative change of velocity"}
#: Most columns of the contact sheet.
COLUMNS = 14


def curves(path: Path, sweeps: dict[str, Sweep], chosen: dict[float, tuple[int, int]], num_blocks: int) -> None:
    """front(n) and back(m) of each probe with 95% intervals, and its window along the stack; a row for each probe.

    Args:
        path: a PNG file.
        chosen: (n, m) by ratio, marked on the first probe's curves.
    """
    windows = any(sweep.places("window") for sweep in sweeps.values())
    figure = Figure(figsize=(10 if windows else 5.5, 3.4 * len(sweeps)), dpi=130, layout="constrained")
    axes = np.atleast_2d(figure.subplots(len(sweeps), 2 if windows else 1, squeeze=False))
    for row, (name, sweep) in enumerate(sweeps.items()):
        left = axes[row, 0]
        for kind, colour, label in (("front", BLUE, "first n blocks"), ("back", ORANGE, "last m blocks")):
            numbers = np.arange(1, len(sweep.places(kind)) + 1)  # type: ignore[arg-type]
            _curve(left, numbers, sweep.mean(kind), *sweep.ends(kind), colour, label)  # type: ignore[arg-type]
            if row == 0:
                for ratio, pair in chosen.items():
                    number = pair[0] if kind == "front" else pair[1]
                    if number:
                        left.plot(number, sweep.mean(kind)[number - 1], "o", color=colour, markersize=7)  # type: ignore[arg-type]
                        left.annotate(
                            f"{100 * ratio:.0f}%", (number, sweep.mean(kind)[number - 1]),  # type: ignore[arg-type]
                            textcoords="offset points", xytext=(0, 8), ha="center", fontsize=8, color=colour,
                        )  # fmt: skip
        left.set(xlabel="blocks without text", ylabel=TITLES[name], ylim=(0, None))
        left.legend(frameon=False)
        if windows:
            right = axes[row, 1]
            places = sweep.places("window")
            width = len(sweep.sets[places[0]].blocks)
            numbers = np.arange(len(places)) + (width - 1) / 2
            _curve(right, numbers, sweep.mean("window"), *sweep.ends("window"), GREY, f"{width} blocks in a row")
            right.set(xlabel="middle of the window (block)", xlim=(0, num_blocks - 1), ylim=(0, None))
            right.legend(frameon=False)
    _save(figure, path)


def _curve(axes: Axes, x: Values, mean: Values, low: Values, high: Values, colour: str, label: str) -> None:
    axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.plot(x, mean, color=colour, linewidth=2, label=label, marker=".", markersize=5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", linewidth=0.6, alpha=0.5)


def heat_map(path: Path, changes: Values, attention: Values, to: str, sigmas: Sequence[float]) -> None:
    """By block and noise level: the change of velocity with that block alone masked, and its attention to the text.

    Args:
        path: a PNG file.
        changes: (sigmas, blocks).
        attention: (sigmas, blocks).
        to: of which text tokens it is.
    """
    count = changes.shape[1]
    figure = Figure(figsize=(0.28 * count + 3.2, 5.2), dpi=130, layout="constrained")
    panels = ((changes, "change of velocity, that block alone masked"), (attention, f"attention to {to}"))
    for axes, (values, title) in zip(figure.subplots(2, 1), panels, strict=True):
        picture = axes.imshow(values, aspect="auto", cmap="viridis", origin="lower", vmin=0)
        axes.set_yticks(range(len(sigmas)), [f"{sigma:g}" for sigma in sigmas])
        every = max(1, count // 24)
        axes.set_xticks(range(0, count, every))
        axes.set(ylabel="sigma", xlabel="block")
        axes.set_title(title, fontsize=10, loc="left")
        figure.colorbar(picture, ax=axes)
    _save(figure, path)


def contact_sheet(path: Path, folder: Path, names: Sequence[str], sets: Sequence[Masked]) -> bool:
    """A row for each adapter, a column for each of at most 14 sets: the same prompt and seed along a row.

    Args:
        path: a PNG file.
        folder: of the pictures, ``<name>-<kind>-<number>.png``.
        names: with which those of each adapter begin.

    Returns:
        Whether there was anything to show.
    """
    columns = _spread(sets)
    side, header, gap = 128, 34, 4
    sheet = Image.new("RGB", (len(columns) * (side + gap), header + len(names) * (side + gap)), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(12)
    shown = 0
    for column, item in enumerate(columns):
        pen.multiline_text((column * (side + gap) + 2, 2), label(item), fill="black", font=font, spacing=1)
        for row, name in enumerate(names):
            file = folder / f"{name}-{item.kind}-{item.number:02d}.png"
            if file.is_file():
                with Image.open(file) as picture:
                    fitted = picture.convert("RGB").resize((side, side), Image.Resampling.LANCZOS)
                sheet.paste(fitted, (column * (side + gap), header + row * (side + gap)))
                shown += 1
    if shown:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda temporary: sheet.save(temporary, format="PNG"))
    return shown > 0


def label(item: Masked) -> str:
    """What a set is, in at most two lines."""
    if item.kind == "none":
        return "all text"
    if item.kind == "front":
        return f"without text:\nfirst {item.number}"
    if item.kind == "back":
        return f"without text:\nlast {item.number}"
    return f"without text:\nblocks {item.blocks[0]}-{item.blocks[-1]}"


def _spread(sets: Sequence[Masked]) -> list[Masked]:
    """All text, then a few of each kind, evenly."""
    kinds = [[item for item in sets if item.kind == kind] for kind in ("front", "window", "back")]
    each = (COLUMNS - 1) // max(1, sum(bool(kind) for kind in kinds))
    found = [item for item in sets if item.kind == "none"][:1]
    for kind in kinds:
        take = min(each, len(kind))
        found += [kind[round(place)] for place in np.linspace(0, len(kind) - 1, take)] if take else []
    return found


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png", metadata={"Software": None}))
