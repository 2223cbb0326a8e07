"""The table of cards for the terminal and as Markdown; cards on which a model gets the same settings share a row."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from blockskip.planner.cards import CARDS, RESERVED, Row
from blockskip.planner.text import aligned, wrapped
from blockskip.units import size

HEADINGS = ("card", "pixels", "skipped", "weights", "recompute", "text", "device", "host", "disk")
NOTE = (
    "pixels: the training resolution; skipped: blocks; weights: how those of the trained blocks are kept; recompute: "
    "gradient checkpointing; text: tokens, and whether text encoders are streamed; device, host: memory of the largest "
    "phase, in brackets that of the smallest plan where nothing fits; disk: what is written. Planned, not measured, "
    "for runs without previews. Settings are changed in a fixed order until a plan fits (docs/memory.md), so a larger "
    "card that need not stream its blocks, which costs time, may have fewer pixels than a smaller one that must. "
    f"Of a card, {size(RESERVED)} is left to the driver, to CUDA's context and allocator, "
    "and to a desktop."
)


def render_text(rows: Sequence[Row]) -> str:
    """A block of lines for each model, no line wider than 100 columns, and the names of the cards."""
    found: list[tuple[str, list[list[str]]]] = []
    for model, group in itertools.groupby(rows, key=lambda row: row.model):
        found.append((model, [list(cells) for cells in _cells(list(group))]))
    lines = aligned(list(HEADINGS), [cells for _, group in found for cells in group])
    shown, body = lines[:2], iter(lines[2:])
    for model, group in found:
        shown += [model, *(next(body) for _ in group)]
    return "\n".join([*shown, "", *wrapped(_names(rows)), *wrapped(NOTE)])


def render_markdown(rows: Sequence[Row]) -> str:
    """One Markdown table, and the names of the cards below it."""
    lines = ["| model | " + " | ".join(HEADINGS) + " |", "| --- " * (len(HEADINGS) + 1) + "|"]
    for model, group in itertools.groupby(rows, key=lambda row: row.model):
        for number, cells in enumerate(_cells(list(group))):
            lines.append(f"| {short_name(model) if not number else ''} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *filter(None, [_names(rows)]), NOTE])


def short_name(model: str) -> str:
    """A hub id without its owner and without what every such name has; any other name as it is."""
    name = model.rpartition("/")[2] if model.count("/") == 1 else model
    return name.removesuffix("diffusers").rstrip("-_").removesuffix("_1024px")


def _cells(rows: list[Row]) -> Iterator[tuple[str, ...]]:
    """The cells of one model, a tuple for all cards on which they are equal."""
    for cells, group in itertools.groupby(rows, key=_figures):
        cards = [f"{row.card:g}" for row in group]
        yield f"{'-'.join(dict.fromkeys((cards[0], cards[-1])))} GB", *cells


def _figures(row: Row) -> tuple[str, ...]:
    smallest = size(row.device_peak_bytes)
    if not row.fits:
        return ("-", "-", "-", "-", "-", f"({smallest})", f"({size(row.host_peak_bytes)})", "-")
    settings = row.settings
    kept = "streamed" if settings["train.stream_middle"] else settings["model.quantization"]
    tokens = f"{settings['data.text_length']}{' streamed' if settings['model.stream_text_encoders'] else ''}"
    return (
        str(settings["data.resolution"]), f"{sum(row.split)}/{row.num_blocks}",
        settings["model.dtype"] if kept == "none" else kept,
        "yes" if settings["train.gradient_checkpointing"] else "no", tokens, smallest, size(row.host_peak_bytes),
        size(row.disk_bytes),
    )  # fmt: skip


def _names(rows: Sequence[Row]) -> str:
    """Usual cards of these sizes, in a sentence; empty where none are known."""
    known = [card for card in sorted({row.card for row in rows}) if card in CARDS]
    return "; ".join(f"{card:g} GB: {CARDS[int(card)]}" for card in known) + ("." if known else "")
