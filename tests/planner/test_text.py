"""Plans as text and as a picture: every figure in its place, aligned, never wider than 100 columns."""

import dataclasses
from pathlib import Path

import pytest
from PIL import Image

from blockskip.errors import UserError
from blockskip.planner.chart import check_chart, write_chart
from blockskip.planner.compare import Compared
from blockskip.planner.counting import DEVICE_ROLES
from blockskip.planner.plan import PHASES, PhasePlan, Plan
from blockskip.planner.text import render_comparison, render_plan
from blockskip.settings import from_flat, to_flat
from blockskip.units import work

GIB = 2**30


def example(scale: float = 1.0, previews: bool = True, seconds: float | None = None) -> Plan:
    """A plan in which phase number n holds n + 1 GiB of each role."""
    phases = {}
    for number, name in enumerate(PHASES, 1):
        device = {role: int(number * scale * GIB) for role in DEVICE_ROLES}
        phases[name] = PhasePlan(
            sum(device.values()), device, 3 * number * GIB, {}, number * 2**20, 0, number * 10**12, number * 10**15,
            previews or name != "preview", seconds,
        )  # fmt: skip
    return Plan("owner/model", "cuda", "bfloat16", (4, 2), 12, to_flat(from_flat({})), phases, ("A remark.",))


def test_a_plan_has_a_column_for_each_phase_and_a_row_for_each_figure() -> None:
    text = render_plan(example())
    rows = {line[:16].strip(): line[16:] for line in text.splitlines() if line[:16].strip()}
    assert "owner/model on cuda in bfloat16" in text
    assert "6 of 12 blocks skipped (4 front, 2 tail)" in text
    header = text.splitlines()[text.splitlines().index("", 1) + 1]
    assert all(name in header for name in PHASES)
    for row, figures in {
        "Device memory": ["6.00 GiB", "12.0 GiB", "18.0 GiB", "24.0 GiB", "30.0 GiB", "36.0 GiB"],
        "optimiser": ["1.00 GiB", "2.00 GiB", "3.00 GiB", "4.00 GiB", "5.00 GiB", "6.00 GiB"],
        "Disk written": ["1.00 MiB", "2.00 MiB"],
        "Work forward": ["1.00 TFLOP", "6.00 TFLOP"],
        "Work backward": ["1.00 PFLOP"],
    }.items():
        assert all(figure in rows[row] for figure in figures), row
    assert "Device memory at most: 36.0 GiB, in save" in text
    assert "Host memory at most: 18.0 GiB, in save" in text
    assert "Disk at most: 21.0 MiB" in text
    assert "A remark." in text
    assert "Time" not in text


def test_times_and_previews_are_told_where_there_are_any() -> None:
    assert "Time, estimated" in render_plan(example(seconds=63))
    assert "1 min 03 s" in render_plan(example(seconds=63))
    with_previews, without = render_plan(example()), render_plan(example(previews=False))
    assert "draws no previews" not in with_previews
    assert "(preview)" in without
    assert "draws no previews" in without


def test_a_comparison_marks_what_was_asked_for_and_relates_work_to_the_first() -> None:
    half = dataclasses.replace(
        example(), phases={name: dataclasses.replace(phase, flops_forward=phase.flops_forward // 2,
                           flops_backward=phase.flops_backward // 2) for name, phase in example().phases.items()},
    )  # fmt: skip
    text = render_comparison([Compared("plain LoRA, 128 px", example()), Compared("skip 50%, 64 px", half, True)])
    (line,) = [line for line in text.splitlines() if line.startswith("Work, all")]
    assert line.split()[-2:] == ["1.00", "0.50"]
    assert "skip 50% *" in text
    assert "* the setting" in text
    assert sum(line.count("4.00 GiB") == 2 for line in text.splitlines()) == len(DEVICE_ROLES)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 99.9])
def test_no_line_is_wider_than_a_terminal_and_figures_are_aligned(scale: float) -> None:
    plan = example(scale, seconds=36000)
    rows = [Compared(f"skip {ratio}%, 1024 px", plan) for ratio in range(5)] + [
        Compared("yours: 12/57, 1024 px", plan, True)
    ]
    for text in (render_plan(plan), render_comparison(rows)):
        lines = text.splitlines()
        assert max(map(len, lines)) <= 100
        rule = next(index for index, line in enumerate(lines) if line and set(line) == {"-"})
        table = lines[rule + 1 : lines.index("", rule)]
        assert {len(line) for line in table} == {len(lines[rule])}


def test_a_chart_is_a_picture_of_a_size_to_be_read(tmp_path: Path) -> None:
    rows = [Compared("plain LoRA, 128 px", example(2)), Compared("skip 50%, 64 px", example(), True)]
    write_chart(rows, tmp_path / "chart.png")
    with Image.open(tmp_path / "chart.png") as picture:
        assert picture.width > 1200
        assert len(picture.convert("RGB").getcolors(2**24) or []) > len(DEVICE_ROLES)
    write_chart(rows, tmp_path / "chart.svg")
    drawn = (tmp_path / "chart.svg").read_text(encoding="utf-8")
    assert all(word in drawn for word in ("plain LoRA, 128 px", "optimiser", "24.0 GiB", "50% less"))
    for bad in ("chart.doc", "none/chart.png"):
        with pytest.raises(UserError, match=bad):
            check_chart(tmp_path / bad)


def test_work_has_three_digits_and_a_unit() -> None:
    told = [work(number) for number in (0, 812, 9_509_447_663_616, 21_356_856_999_936_000, 10**18)]
    assert told == ["0 FLOP", "812 FLOP", "9.51 TFLOP", "21.4 PFLOP", "1.00 EFLOP"]
