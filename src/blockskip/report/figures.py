"""The drawings of a report, as SVG that takes its colours and its font from the page.

No name of a column or prompt is drawn: legends are written by the page.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from blockskip.measure import PhaseRecord
from blockskip.report.content import SERIES, Report, RunFacts
from blockskip.units import duration, size

#: Colours that stand for the page's own: each is replaced by ``var(--name)``.
COLOURS = {"ink": "#0a0b01", "muted": "#0a0b02", "line": "#0a0b03"}
COLOURS |= {f"series-{number}": f"#0a0c0{number}" for number in range(SERIES)}
WIDTH = 5.0  # inches; 360 units of the drawing
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 10,
    "path.simplify": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.linewidth": 1,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": COLOURS["ink"],
    "axes.labelcolor": COLOURS["muted"],
    "xtick.labelcolor": COLOURS["muted"],
    "ytick.labelcolor": COLOURS["muted"],
    "axes.edgecolor": COLOURS["line"],
    "grid.color": COLOURS["line"],
    "xtick.color": COLOURS["line"],
    "ytick.color": COLOURS["line"],
}


def losses(report: Report) -> str | None:
    """Loss by optimiser step of every run: faint as it is, strong as a running mean. None without a curve."""
    curves = []
    for column, series in zip(report.columns, report.series, strict=True):
        points = [(step, loss) for step, loss in column.losses or [] if np.isfinite(loss)]
        if len(points) > 1:
            curves.append((np.asarray(points, dtype=float), COLOURS[f"series-{series}"]))
    if not curves:
        return None

    def draw(axes: Axes) -> None:
        means = []
        for points, colour in curves:
            steps, values = points.T
            every = max(1, len(steps) // 1500)
            axes.plot(steps[::every], values[::every], color=colour, alpha=0.28, linewidth=0.8)
            means.append(smooth(values))
            axes.plot(steps[::every], means[-1][::every], color=colour, linewidth=2.2)
        together = np.concatenate([points[:, 1] for points, _ in curves])
        low, high = together.min(), max(np.percentile(together, 99), *(mean.max() for mean in means))
        pad = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
        axes.set_ylim(low - pad, high + pad)
        axes.set(xlabel="optimiser step", ylabel="loss (mean squared error)")
        axes.grid(axis="y", linewidth=0.7, alpha=0.7)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(6))
        axes.tick_params(length=0)

    return _svg("losses", "Loss by optimiser step of each run", 2.8, draw)


def smooth(values: np.ndarray) -> np.ndarray:
    """The mean of the values around each one, about a twelfth of all, fewer at both ends; same shape."""
    half = len(values) // 24
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(len(values))
    first, behind = np.maximum(places - half, 0), np.minimum(places + half + 1, len(values))
    return np.asarray((sums[behind] - sums[first]) / (behind - first))


def memory(report: Report) -> str | None:
    """Peak host memory by phase and run; the strong part of a bar is private, the whole is private and mapped."""
    bars = _by_phase(report, lambda record: (record.host_peak, record.host_private_peak))
    return _bars("memory", "Peak memory by phase of each run", report, bars, lambda value: size(round(value)))


def device_memory(report: Report) -> str | None:
    """Peak device memory by phase and run; the strong part of a bar are tensors, the whole is reserved."""
    if not any(facts.on_device for _, facts in report.runs):
        return None
    bars = _by_phase(report, lambda record: (record.device_reserved_peak, record.device_allocated_peak))
    return _bars("device", "Peak device memory by phase of each run", report, bars, lambda value: size(round(value)))


def seconds(report: Report) -> str | None:
    """Time by phase and run."""
    bars = _by_phase(report, lambda record: (record.seconds, record.seconds))
    return _bars("seconds", "Time by phase of each run", report, bars, duration)


def fidelity(report: Report) -> str | None:
    """Lines from the floor to each column's subject fidelity, between floor and ceiling; None without a scale."""
    shown = [
        (column.fidelity, series)
        for column, series in zip(report.columns, report.series, strict=True)
        if column.fidelity is not None and column.fidelity.share is not None
    ]
    if not shown:
        return None
    floors, ceilings = ({getattr(item, end) for item, _ in shown} for end in ("floor", "ceiling"))
    floor, ceiling = min(floors), max(ceilings)

    def draw(axes: Axes) -> None:
        highest = max([ceiling, *(item.value for item, _ in shown)])
        lowest = min([floor, *(item.value for item, _ in shown)])
        span = highest - lowest
        for row, (item, series) in enumerate(shown):
            colour = COLOURS[f"series-{series}"]
            axes.plot([floor, item.value], [-row, -row], color=colour, linewidth=7, solid_capstyle="round")
            axes.text(highest + 0.04 * span, -row, f"{item.value:.3f}  ({100 * (item.share or 0):.0f}%)", va="center")
        for place, text, side in ((floor, f"base {floor:.3f}", "left"), (ceiling, f"real {ceiling:.3f}", "right")):
            axes.axvline(place, color=COLOURS["muted"], linewidth=1.2, linestyle=(0, (3, 2)))
            axes.text(place, 0.62, text, ha=side, va="bottom", color=COLOURS["muted"])
        axes.set(xlim=(lowest - 0.04 * span, highest + 0.45 * span), ylim=(0.5 - len(shown), 0.6))
        axes.set_axis_off()

    return _svg("fidelity", "Subject fidelity of each column between floor and ceiling", 0.45 + 0.3 * len(shown), draw)


def blocks(facts: RunFacts, series: int) -> str:
    """A strip of the transformer's blocks: skipped ones hollow, kept ones grey, trained ones in the run's colour."""
    front, tail = facts.split or (0, 0)
    count = max(1, facts.num_blocks)
    step = 600 / count
    gap = min(4.0, 0.2 * step)
    rects = []
    for index in range(facts.num_blocks):
        ends = (index < front, facts.front), (index >= facts.num_blocks - tail, facts.tail)
        what = next((what for inside, what in (*ends, (index in range(*facts.inner), "skipped")) if inside), "trained")
        stroke = f"series-{series}" if what == "trained" else "muted"
        fill = f'fill="var(--{stroke})"' if what in ("trained", "kept") else 'fill="none" stroke-dasharray="3 2"'
        rects.append(
            f'<rect x="{index * step + gap / 2 + 0.5:.2f}" y="1" width="{max(1.0, step - gap - 1):.2f}" '
            f'height="24" rx="{min(4.0, step / 4):.1f}" {fill} stroke="var(--{stroke})"/>'
        )
    inner = facts.inner[1] - facts.inner[0]
    trained = facts.num_blocks - front - tail - inner
    label = f"{facts.num_blocks} blocks: {front} front, {trained} trained, {tail} tail"
    if inner:
        label = f"{facts.num_blocks} blocks: {trained} trained, {inner} skipped inside"
    return f'<svg viewBox="0 0 600 26" role="img" aria-label="{label}">{"".join(rects)}</svg>'


Bars = list[tuple[str, list[tuple[float, float] | None]]]


def _by_phase(report: Report, pair: Callable[[PhaseRecord], tuple[float, float]]) -> Bars:
    """For each phase the (whole, strong part) of each run; None where a run lacks the phase or it took nothing."""
    runs = [{record.name: pair(record) for record in facts.phases} for _, facts in report.runs]
    return [(name, [run[name] if name in run and run[name][0] else None for run in runs]) for name in report.phases]


def _bars(name: str, label: str, report: Report, values: Bars, text: Callable[[float], str]) -> str | None:
    """Groups of horizontal bars, one group a phase, one bar a run."""
    if not values:
        return None
    runs = [series for column, series in zip(report.columns, report.series, strict=True) if column.facts is not None]
    largest = max((pair[0] for _, pairs in values for pair in pairs if pair), default=0) or 1

    def draw(axes: Axes) -> None:
        place, ticks = 0.0, []
        for _, pairs in values:
            ticks.append(place + (len(pairs) - 1) / 2)
            for series, pair in zip(runs, pairs, strict=True):
                if pair:
                    colour = COLOURS[f"series-{series}"]
                    axes.barh(place, pair[0], height=0.82, color=colour, alpha=0.4)
                    axes.barh(place, min(pair), height=0.82, color=colour)
                    axes.text(pair[0] + 0.015 * largest, place, text(pair[0]), va="center")
                place += 1
            place += 0.7
        axes.set_yticks(ticks, [phase for phase, _ in values])
        axes.set(xlim=(0, 1.28 * largest), ylim=(place - 1.1, -0.6))
        axes.tick_params(length=0)
        axes.xaxis.set_visible(False)
        axes.spines["bottom"].set_visible(False)

    return _svg(name, label, 0.2 + 0.21 * len(values) * (len(runs) + 0.7), draw)


def _svg(name: str, label: str, height: float, draw: Callable[[Axes], None]) -> str:
    style: Any = {**STYLE, "svg.hashsalt": name}
    with mpl.rc_context(style):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        draw(figure.add_subplot())
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<(metadata|style).*?</\1>", "", text, flags=re.DOTALL)  # a style would hold for the whole page
    box = re.search(r'viewBox="[^"]+"', text)
    assert box is not None
    text = f'<svg {box[0]} role="img" aria-label="{label}">' + text[text.index(">") + 1 :]
    text = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{name}-", text)  # ids are of the page, not of the drawing
    text = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", text)
    for variable, placeholder in COLOURS.items():
        text = text.replace(placeholder, f"var(--{variable})")
    return text
