"""What ``blockskip plan`` prints: a plan, a comparison or a table of cards, with times and a chart where asked for."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from blockskip.config import Config
from blockskip.errors import UserError
from blockskip.planner import timing
from blockskip.planner.cards import CARDS, card_memory, fitted_cards
from blockskip.planner.cards import as_json as cards_json
from blockskip.planner.cards_text import render_markdown, render_text, short_name
from blockskip.planner.chart import check_chart, write_chart
from blockskip.planner.compare import compare as compared
from blockskip.planner.named import named_models
from blockskip.planner.request import make_request
from blockskip.planner.text import render_comparison, render_plan
from blockskip.progress import progress
from blockskip.settings import from_flat


def plan(
    config: Config, *, compare: bool = False, chart: Path | None = None, measure: bool = False, as_json: bool = False
) -> str:
    """The text to print, without its last line break.

    Args:
        compare: beside plain LoRA and the paper's ratios.
        chart: a file for the comparison's picture.
        measure: time single blocks on this machine for estimates of seconds.
        as_json: JSON instead of tables: ``Plan.as_json``, or of a comparison ``{"plans": {name: Plan.as_json}}``.

    Raises:
        UserError: something that was given cannot be used.
        OutOfMemory: this machine has no memory for the blocks that ``measure`` times.
    """
    if chart is not None:
        check_chart(chart)
    request = make_request(config)
    speed = timing.measure(request.setting) if measure else None
    if not compare:
        found = request.plan()
        found = found if speed is None else timing.timed(found, speed)
        return _json(found.as_json()) if as_json else render_plan(found).rstrip("\n")
    rows = compared(request)
    if speed is not None:
        rows = [dataclasses.replace(row, plan=timing.timed(row.plan, speed)) for row in rows]
    if chart is not None:
        write_chart(rows, chart)
    if as_json:
        return _json({"plans": {row.name: row.plan.as_json() for row in rows}})
    written = "" if chart is None else f"\nChart: {chart}"
    return render_comparison(rows).rstrip("\n") + written


def table(
    values: Mapping[str, Any],
    models: Sequence[str] = (),
    cards: Sequence[str] = (),
    *,
    as_json: bool = False,
    markdown: bool = False,
) -> str:
    """What fits on which card: the text to print, without its last line break.

    Args:
        values: dotted keys that the user set, without model and device memory.
        models: default: all that are built in.
        cards: their memory, ``8GB``; default: the usual sizes.
        as_json: ``cards.as_json``.
        markdown: a Markdown table.

    Raises:
        UserError: everything that was given and cannot be used.
    """
    sizes, problems = list[float](), list[str]()
    for card in cards:
        try:
            sizes.append(card_memory(card))
        except UserError as error:
            problems += error.problems
    for model in models or named_models()[:1]:
        try:
            make_request(from_flat({**values, "model.path": model, "train.device": "cuda"}))
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(dict.fromkeys(problems))
    sizes, models = sizes or list(CARDS), models or named_models()
    with progress(len(models) * len(sizes), "Plans") as bar:
        rows = fitted_cards(values, models, sizes, lambda model: bar.advance(1, short_name(model)))
    if as_json:
        return _json(cards_json(rows))
    return render_markdown(rows) if markdown else render_text(rows)


def _json(document: dict[str, object]) -> str:
    return json.dumps(document, indent=2)
