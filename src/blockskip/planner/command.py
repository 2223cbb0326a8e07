"""What ``blockskip plan`` prints: a plan or a comparison, as text or JSON, with times and a chart where asked for."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from blockskip.config import Config
from blockskip.planner import timing
from blockskip.planner.chart import check_chart, write_chart
from blockskip.planner.compare import compare as compared
from blockskip.planner.request import make_request
from blockskip.planner.text import render_comparison, render_plan


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


def _json(document: dict[str, object]) -> str:
    return json.dumps(document, indent=2)
