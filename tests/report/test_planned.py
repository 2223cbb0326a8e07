"""Planned beside measured memory, and what exceeded its budget, in the page and in the terminal."""

from __future__ import annotations

import dataclasses
import re

from blockskip.report.content import Overrun, Report
from blockskip.report.html import render_html
from blockskip.report.planned import Compared, compared, warnings
from blockskip.report.text import render_text
from tests.report.examples import MIB, bare, budget, full

SENTENCE = (
    "train took 190 MiB of memory, its budget is 160 MiB (+19%). "
    "Try --train.gradient-checkpointing or --train.stream-middle."
)


def test_each_phase_that_was_planned_has_its_difference():
    rows = [
        ("encode", "190 MiB", "200 MiB", "+5%"),
        ("precompute", "131 MiB", "131 MiB", "same"),
        ("train", "150 MiB", "190 MiB", "+27%"),
    ]
    assert compared(budget()) == [Compared("DiT-BlockSkip, memory", rows)]
    assert compared(bare()) == [] and warnings(bare()) == []


def test_an_accelerator_comes_before_the_host():
    device, host = compared(budget(600))
    assert device.title == "DiT-BlockSkip, device memory" and host.title == "DiT-BlockSkip, host memory"
    assert device.rows[0] == ("encode", "0 B", "0 B", "-")
    assert device.rows[1:] == [("precompute", "600 MiB", "200 MiB", "-67%"), ("train", "300 MiB", "300 MiB", "same")]
    assert host.rows[2] == ("train", "150 MiB", "190 MiB", "+27%")


def test_what_exceeded_its_budget_stands_in_a_box_above_all_figures():
    page = render_html(budget())
    box = page.index('class="warning"')
    assert page.index("</header>") < box < page.index('class="headlines"') < page.index("<table>")
    assert SENTENCE in page and "Try &lt;b&gt;." in page and "Try <b>" not in page
    assert 'class="warning"' not in render_html(bare()) and "Measured" not in render_html(bare())
    text = render_text(budget())
    assert text.index("WARNING: train took 190 MiB") < text.index("Blocks skipped") < text.index("Difference")
    assert re.search(r"\n  train +150 MiB +190 MiB +\+27%\n", text)


def test_of_several_runs_the_one_is_named():
    report = full()
    over = Overrun("train", "memory", 20 * MIB, 10 * MIB, "less")
    columns = [
        column if column.facts is None else dataclasses.replace(
            column, facts=dataclasses.replace(column.facts, overruns=[over])
        )
        for column in report.columns
    ]  # fmt: skip
    sentence = "train took 20.0 MiB of memory, its budget is 10.0 MiB (+100%). Try less."
    several = Report(report.title, "", [], report.prompts, columns)
    assert warnings(several) == [f"Plain LoRA: {sentence}", f"DiT-BlockSkip: {sentence}"]
