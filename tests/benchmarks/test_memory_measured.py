"""The memory benchmark: a real run in a process of its own, beside its plan; and the table that is made of it."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import memory_measured
from benchmarks.memory_measured import MIB, Row, cells_of, device_wide
from blockskip import builtin

PHASES = ("encode text", "encode pictures", "precompute", "train", "preview")


@pytest.mark.parametrize("model", ["builtin", "builtin-sana"])
def test_a_run_takes_what_was_planned(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each phase of a built-in model within 10% of the plan, private and mapped memory and the baseline included."""
    output = tmp_path / "measured.json"
    rows = memory_measured.main(["--model", model, "--device", "cpu", "--json", str(output)])
    assert tuple(row.phase for row in rows) == PHASES
    assert [{name: item[name] for name in ("model", "phase", "measured")} for item in json.loads(output.read_text())] \
        == [{"model": row.model, "phase": row.phase, "measured": row.measured} for row in rows]  # fmt: skip
    for row in rows:
        assert row.baseline > 100 * MIB, "the process has imported torch"
        assert max(row.private, row.mapped) <= row.measured <= row.private + row.mapped, row
        assert abs(row.of_the_process) <= 0.10, row
    assert f"Baseline: {model}" in capsys.readouterr().out


def test_differences_are_of_what_they_say() -> None:
    row = Row("model", "train", planned=100 * MIB, measured=150 * MIB, private=120 * MIB, mapped=40 * MIB,
              baseline=400 * MIB)  # fmt: skip
    assert row.difference == pytest.approx(0.5)
    assert row.of_the_process == pytest.approx(550 / 500 - 1)
    headings, cells = cells_of([row])
    assert cells == [("model", "train", "100", "150", "+50%", "120", "40", "550", "+10%")]
    assert "allocated" not in headings
    on_device = Row("model", "train", 100 * MIB, 150 * MIB, 1, 1, 400 * MIB, 80 * MIB, 100 * MIB, 128 * MIB, 500 * MIB)
    headings, cells = cells_of([on_device])
    assert dict(zip(headings[-5:], cells[0][-5:], strict=True)) == {
        "device planned": "80", "allocated": "100", "difference": "+25%", "reserved": "128", "device-wide": "500",
    }  # fmt: skip


def test_a_cpu_has_no_device_of_its_own() -> None:
    with device_wide(torch.device("cpu")) as in_use:
        assert in_use == {}


def test_a_phase_apart_goes_on_with_the_run_and_ends_it(tmp_path: Path) -> None:
    values = memory_measured.SETTINGS | {
        "model.path": "builtin-sana", "data.images": str(builtin.subject_path("teapot") / "train"),
        "data.resolution": 32, "data.full_resolution": 32, "output": str(tmp_path), "train.device": "cpu",
        "preview.height": 32, "preview.width": 32,
    }  # fmt: skip
    there = {
        "encode text": {"text"}, "encode pictures": {"text", "pixels"}, "precompute": {"text", "pixels", "features"},
        "train": {"text", "pixels", "features", "adapter"}, "preview": {"adapter"},
    }  # fmt: skip
    for phase in PHASES:
        (row,) = memory_measured.run(values, phase)
        assert row.phase == phase
        assert row.planned > 0 and row.seconds > 0
        found = {path.parent.name for path in tmp_path.rglob("*") if path.suffix in (".safetensors", ".png")}
        assert {name for name in found if name in set().union(*there.values())} == there[phase]
    losses = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(losses) == values["train.steps"], "each step is done once"
