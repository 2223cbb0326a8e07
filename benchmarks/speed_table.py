"""The figures of ``benchmarks.speed`` as tables, with the aims beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

#: Total over FLOP bound; share of plain LoRA at 50%; the same with a pool of a quarter; waiting for the store.
AIMS = {"over_bound": 1.15, "total": 0.40, "pool": 0.30, "waiting": 0.02}

HEADINGS = (
    "way", "micro-step", "update", "precompute a sample", "500 steps", "of plain", "FLOP bound", "over bound",
    "pool ¼: of plain", "its bound", "waiting",
)  # fmt: skip


def text_tables(name: str, figures: Sequence[Any]) -> str:
    """A model's table for a terminal, and the aims of its last row."""
    rows = [HEADINGS, *rows_of(figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = [
        "  ".join(cell.ljust(width) if not column else cell.rjust(width)
                  for column, (cell, width) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]  # fmt: skip
    return "\n".join([f"\n{name}", *lines, *aims(figures)])


def markdown_tables(models: Mapping[str, Sequence[Any]]) -> str:
    """All models in one table."""
    lines = ["| model | " + " | ".join(HEADINGS) + " |", "| --- " * (len(HEADINGS) + 1) + "|"]
    for name, figures in models.items():
        for number, row in enumerate(rows_of(figures)):
            lines.append(f"| {name if not number else ''} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def rows_of(figures: Sequence[Any]) -> list[tuple[str, ...]]:
    """One row a way of training."""
    plain, rows = figures[0], []
    for one in figures:
        share, pool = one.total / plain.total, one.pool_total / plain.total
        rows.append((
            one.way, seconds(one.micro_step), seconds(one.update), seconds(one.precompute), seconds(one.total),
            f"{share:.3f}", f"{one.bound:.3f}", f"{share / one.bound:.2f}", f"{pool:.3f}", f"{one.pool_bound:.3f}",
            f"{one.waiting_share:.1%}",
        ))  # fmt: skip
    return rows


def aims(figures: Sequence[Any]) -> list[str]:
    """One line for each aim of the last row (50%): what it is, and whether it is met."""
    plain, one = figures[0], figures[-1]
    share = one.total / plain.total
    found = {
        "over_bound": share / one.bound, "total": share, "pool": one.pool_total / plain.total,
        "waiting": one.waiting_share,
    }  # fmt: skip
    words = {
        "over_bound": "total over its FLOP bound", "total": "total over plain LoRA's",
        "pool": "with a pool of a quarter", "waiting": "of a step waits for the store",
    }  # fmt: skip
    return [
        f"  {one.way}: {words[name]} {found[name]:.3f}, aim {aim:.2f}: {'met' if found[name] <= aim else 'missed'}"
        for name, aim in AIMS.items()
    ]


def seconds(value: float) -> str:
    """``12.3 ms``, ``4.56 s``, ``123 s`` or a dash for nothing."""
    if value <= 0:
        return "–"
    if value < 1:
        return f"{value * 1000:.1f} ms"
    return f"{value:.2f} s" if value < 100 else f"{value:.0f} s"
