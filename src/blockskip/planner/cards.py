"""What fits on graphics cards: every model is fitted to every card, and the settings that were chosen are kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from blockskip.errors import UserError
from blockskip.planner.budget import Budget, Fitted
from blockskip.planner.fitting import fit_config
from blockskip.settings import from_flat, size_in_bytes

#: GB as cards are sold, which are GiB, with usual cards that have them.
CARDS = {
    4: "GTX 1650, RTX 3050 Laptop", 6: "RTX 2060, RTX 3060 Laptop", 8: "RTX 3060 Ti, RTX 3070, RTX 4060",
    12: "RTX 3060 12GB, RTX 4070", 16: "RTX 4060 Ti 16GB, RTX 4080", 24: "RTX 3090, RTX 4090",
}  # fmt: skip
#: Bytes of a card that tensors cannot have: what the driver keeps (about 0.3 GiB), CUDA's context and its allocator
#: (0.33 GiB, ``benchmarks.paper_memory``), and the rest for a desktop.
RESERVED = 2**30
#: The settings that are shown of a fitted run.
SHOWN = (
    "data.resolution", "data.text_length", "model.dtype", "model.quantization", "model.stream_text_encoders",
    "model.read_ahead", "train.gradient_checkpointing", "train.stream_middle",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A model on a card.

    Args:
        card: its memory in GB.
        fits: whether anything fits; if not, the rest is of the smallest plan that was tried.
        split: blocks skipped at the front and at the tail, of ``num_blocks``.
        settings: those of ``SHOWN`` with their values.
        device_peak_bytes, host_peak_bytes, disk_bytes: of the plan.
        phase: the one that takes most of the device.
    """

    model: str
    card: float
    fits: bool
    split: tuple[int, int]
    num_blocks: int
    settings: dict[str, Any]
    device_peak_bytes: int
    host_peak_bytes: int
    disk_bytes: int
    phase: str


def card_memory(text: str) -> float:
    """GB of a card from ``8GB`` or ``8GiB``, which are the same.

    Raises:
        UserError: the text is no size, has no unit, or is no more than what is reserved.
    """
    lowered = text.strip().lower()
    amount = lowered.removesuffix("gib").removesuffix("gb")
    try:
        found = float(amount)
    except ValueError:
        found = 0.0
    if not RESERVED / 2**30 < found < 1e6:
        raise UserError(f'memory.device = "{text}" is not the memory of a card; write for example "8GB".')
    if amount == lowered:
        raise UserError(f'memory.device = "{text}" has no unit; write for example "8GB".')
    return found


def fitted_cards(
    values: Mapping[str, Any],
    models: Sequence[str],
    cards: Sequence[float],
    advance: Callable[[str], object] = lambda model: None,
) -> list[Row]:
    """Every model on every card, in the order of both.

    Args:
        values: dotted keys that stay as they are; ``memory.host`` and ``memory.disk`` bound every run.
        cards: GB.
        advance: called with the model's name after each row.

    Raises:
        UserError: a value cannot be used, or there is no such model.
    """
    bounds = {
        name: size_in_bytes(key, str(values[key])) for name in ("host", "disk") if values.get(key := f"memory.{name}")
    }
    rows = []
    for model in models:
        config = from_flat(dict(values) | {"model.path": model})
        for card in cards:
            budget = Budget(device=int(card * 2**30) - RESERVED, **bounds)
            rows.append(_row(card, fit_config(config, {*values, "model.path"}, budget, torch.device("cuda"))))
            advance(model)
    return rows


def _row(card: float, fitted: Fitted) -> Row:
    plan = fitted.plan
    used = plan.used()
    return Row(
        plan.model, card, not fitted.misses, plan.split, plan.num_blocks,
        {name: plan.settings[name] for name in SHOWN}, plan.device_peak_bytes, plan.host_peak_bytes, plan.disk_bytes,
        max(used, key=lambda name: used[name].device_peak_bytes),
    )  # fmt: skip


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    """Plain values; ``from_json`` is the inverse."""
    return {"reserved_bytes": RESERVED, "rows": [dataclasses.asdict(row) | {"split": [*row.split]} for row in rows]}


def from_json(document: Mapping[str, Any]) -> list[Row]:
    """The rows of ``as_json``.

    Raises:
        KeyError, TypeError: it is none.
    """
    return [Row(**row | {"split": tuple(row["split"])}) for row in document["rows"]]
