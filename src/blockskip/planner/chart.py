"""A comparison of plans as a picture: one bar a setting, made of what holds the device's memory while training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from blockskip.errors import UserError
from blockskip.planner.compare import Compared
from blockskip.planner.counting import DEVICE_ROLES
from blockskip.planner.text import ROLES, base_of, steps_of
from blockskip.units import size

GIB = 2**30
INK, MUTED, LINE = "#1d2433", "#687083", "#e4e7ee"
#: One colour a role, told apart by people who do not see all colours, too.
COLOURS = {
    "weights": "#2f4b7c", "adapters": "#e8a33d", "gradients": "#d45087", "optimizer": "#8a5ca8",
    "activations": "#4fa3a5", "other": "#b8bfcc",
}  # fmt: skip
FORMATS = (".png", ".svg", ".pdf")
STYLE: dict[str, Any] = {
    "text.parse_math": False, "font.size": 11, "text.color": INK, "axes.edgecolor": LINE, "axes.labelcolor": MUTED,
    "xtick.color": MUTED, "ytick.color": INK, "svg.hashsalt": "plan", "svg.fonttype": "none",
}  # fmt: skip


def check_chart(path: Path) -> None:
    """See that the picture can be written there.

    Raises:
        UserError: its ending is of no known format, or its folder does not exist.
    """
    if path.suffix.lower() not in FORMATS:
        raise UserError(f'--chart "{path}" must end in {", ".join(FORMATS[:-1])} or {FORMATS[-1]}.')
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UserError(f'--chart "{path}" cannot be written; name a file in a folder that exists.')


def write_chart(rows: Sequence[Compared], path: Path) -> None:
    """Write the picture; its ending says the format (``FORMATS``).

    Raises:
        UserError: it cannot be written.
    """
    check_chart(path)
    with mpl.rc_context(STYLE):
        figure = _draw(rows)
        try:
            figure.savefig(path, dpi=160, facecolor="white", metadata=_undated(path))
        except OSError as error:
            raise UserError(f'--chart "{path}" cannot be written: {error.strerror}.') from None


def _draw(rows: Sequence[Compared]) -> Figure:
    first = rows[0].plan
    peaks = [row.plan.phases["train"].device_peak_bytes / GIB for row in rows]
    height = 1.75 + 0.52 * len(rows)
    figure = Figure(figsize=(9.6, height))
    axes = figure.add_axes((0.2, 0.62 / height, 0.77, (height - 1.75) / height))
    for place, row in enumerate(rows):
        left = 0.0
        for role in DEVICE_ROLES:
            value = row.plan.phases["train"].device[role] / GIB
            axes.barh(place, value, left=left, height=0.66, color=COLOURS[role], linewidth=0)
            left += value
        less = 100 * (1 - peaks[place] / peaks[0])
        note = f"   {less:.0f}% less" if less >= 0.5 else ""
        name = size(row.plan.phases["train"].device_peak_bytes)
        label = axes.annotate(name, (left, place), (7, 0), textcoords="offset points", va="center", weight="bold")
        axes.annotate(note, (1, 0.5), xycoords=label, va="center", color=MUTED)
    names = [row.name + (" *" if row.chosen else "") for row in rows]
    axes.set_yticks(range(len(rows)), names)
    for text, row in zip(axes.get_yticklabels(), rows, strict=True):
        text.set_fontweight("bold" if row.chosen else "normal")
    axes.set_xlim(0, 1.27 * max(peaks))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    marked = "      * the setting asked for" if any(row.chosen for row in rows) else ""
    axes.set_xlabel(f"GiB on the device at the peak of a training step{marked}")
    axes.grid(axis="x", color=LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    model = first.model.rpartition("/")[2]
    figure.text(0.025, 1 - 0.3 / height, f"What training a LoRA of {model} holds on the device", size=15,
                weight="bold", va="center")  # fmt: skip
    settings = first.settings
    figure.text(0.025, 1 - 0.58 / height, f"planned for {first.device} in {base_of(first)}, LoRA rank "
                f"{settings['lora.rank']}, {steps_of(first)}", color=MUTED, va="center")  # fmt: skip
    shown = [role for role in DEVICE_ROLES if any(row.plan.phases["train"].device[role] for row in rows)]
    handles = [Rectangle((0, 0), 1, 1, color=COLOURS[role], linewidth=0) for role in shown]
    figure.legend(handles, [ROLES[role] for role in shown], ncols=len(shown), frameon=False, loc="center left",
                  bbox_to_anchor=(0.012, 1 - 0.88 / height), handlelength=1, handleheight=1, columnspacing=1.6,
                  handletextpad=0.5, labelcolor=INK)  # fmt: skip
    return figure


def _undated(path: Path) -> dict[str, Any]:
    return {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix.lower(), {})
