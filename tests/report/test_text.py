"""The terminal table: the right figures, aligned, never wider than 100 columns."""

from __future__ import annotations

import pytest

from blockskip.report.content import Column, Report
from blockskip.report.table import headlines, table
from blockskip.report.text import render_text
from blockskip.report.wording import shorten, width
from blockskip.units import change, count, duration, size
from tests.report.examples import EXAMPLES, bare, full, plain

MIB = 2**20


def test_units():
    assert [size(n) for n in (0, 812, 1023, 1024, 45 * MIB, 432_100_000, 1024 * MIB - 1, 2 * 1024 * MIB)] == [
        "0 B",
        "812 B",
        "1023 B",
        "1.00 KiB",
        "45.0 MiB",
        "412 MiB",
        "1.00 GiB",
        "2.00 GiB",
    ]
    assert size(412 * MIB, 380 * MIB, 95 * MIB) == "412 MiB (380 + 95)"
    assert size(1884 * MIB, 1638 * MIB, 318 * MIB) == "1.84 GiB (1.60 + 0.31)"
    assert [duration(s) for s in (0.04, 3.44, 9.96, 42, 59.6, 185, 3599.6, 3725)] == [
        "0.0 s",
        "3.4 s",
        "10 s",
        "42 s",
        "1 min 00 s",
        "3 min 05 s",
        "1 h 00 min",
        "1 h 02 min",
    ]
    assert [count(n) for n in (0, 812, 9_310, 18_240_000, 11_900_000_000)] == ["0", "812", "9.31 k", "18.2 M", "11.9 B"]
    assert [change(45, 100), change(112, 100), change(100, 100), change(5, 0)] == ["-55%", "+12%", "same", "same"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_line_fits_and_columns_are_aligned(name):
    text = render_text(EXAMPLES[name]())
    assert text.endswith("\n")
    assert all(width(line) <= 100 for line in text.splitlines())
    assert not any(c for c in text if ord(c) < 32 and c != "\n") and "\x1b" not in text
    rules = [index for index, line in enumerate(text.splitlines()) if line.startswith("---")]
    for rule in rules:  # the last column ends where the rule ends, in the heading and in every row
        lines = text.splitlines()
        rows = [line for line in lines[rule + 1 :][: lines[rule + 1 :].index("")] if line.startswith("  ")]
        assert rows and {width(line) for line in [lines[rule - 1], lines[rule], *rows]} == {width(lines[rule])}


def test_the_figures_are_there():
    text = render_text(full())

    def cells(label):
        line = next(line for line in text.splitlines() if line.startswith("  " + label))
        return [cell.strip() for cell in line[2 + len(label) :].split("  ") if cell.strip()]

    assert cells("Blocks skipped") == ["-", "0 of 12", "6 of 12 (3 front, 3 tail)"]
    assert cells("Parameters skipped") == ["-", "0", "9.12 M"]
    assert cells("Parameters kept") == ["-", "18.2 M", "9.12 M"]
    assert cells("Parameters trained") == ["-", "402 k", "201 k"]
    assert cells("precompute") == ["-", "-", "131 MiB (96 + 62)"]
    assert cells("train") == ["-", "433 MiB (402 + 38)", "190 MiB (168 + 31)"]
    assert cells("Highest") == ["-", "433 MiB", "321 MiB"]
    assert cells("Whole run") == ["-", "8 min 06 s", "4 min 04 s"]
    assert cells("Features, text and latents") == ["-", "3.00 MiB", "212 MiB"]
    assert cells("Cosine to kept-back pictures") == ["0.412", "0.721", "0.709"]
    assert cells("Floor: base model") == ["0.412"] * 3 and cells("Ceiling: real pictures") == ["0.801"] * 3
    assert cells("Share of the way") == ["0%", "79%", "76%"]
    assert "321 MiB peak memory, in preview (Plain LoRA: 433 MiB, here -26%)" in text
    assert "50% of the weights skipped" in text
    assert "The process itself took 312 MiB." in text


def test_a_device_has_rows_and_a_headline_of_its_own():
    groups = {group.title: group for group in table(EXAMPLES["device"]())}
    rows = {row.label: row.cells for row in groups["Peak device memory (reserved)"].rows}
    assert rows["train"] == ["-", "40.0 GiB (44.0)", "20.0 GiB (22.0)"]
    assert "encode" not in rows or rows["encode"] == ["-", "-", "-"]
    assert headlines(EXAMPLES["device"]())[0].label == "peak device memory, in train"


def test_more_columns_than_fit_come_in_several_tables():
    text = render_text(Report("many", "", [], [], [Column(f"run {n}", facts=plain()) for n in range(6)]))
    assert text.count("Blocks skipped") > 1
    assert all(f"run {n}" in text for n in range(6))


def test_nothing_measured_gives_no_table():
    report = Report("only pictures", "", [], [], [Column("Base model")])
    assert render_text(report) == "only pictures\n"
    assert table(report) == [] and headlines(report) == []
    assert not any(group.title == "Subject fidelity" for group in table(bare()))


def test_shorten_counts_what_a_terminal_shows():
    assert width("a\N{DOG FACE}\u72d7e\u0301") == 1 + 2 + 2 + 1
    assert shorten("two\nlines \x1b[31m\u202ered\ud800", 40) == "two lines [31mred"
    assert shorten("\u72d7" * 10, 7) == "\u72d7" * 3 + "\N{HORIZONTAL ELLIPSIS}"
