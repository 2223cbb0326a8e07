"""The guard itself, and what it guards: planned peaks of four published models."""

import json
from pathlib import Path

import pytest

from benchmarks import memory_guard
from benchmarks.memory_guard import Peaks, raised

BEFORE: Peaks = {"one": {"train": 1_000_000, "precompute": 500_000}, "other": {"train": 2_000_000}}


def test_no_planned_peak_has_risen() -> None:
    assert raised(memory_guard.read(), memory_guard.planned_peaks()) == []


def test_every_model_has_its_phases_on_record() -> None:
    recorded = memory_guard.read()
    assert list(recorded) == list(memory_guard.MODELS)
    assert all({"precompute", "train"} <= set(phases) for phases in recorded.values())


@pytest.mark.parametrize("model", BEFORE)
def test_a_raised_peak_fails_with_both_figures(model: str) -> None:
    old = BEFORE[model]["train"]
    new = old + old // 50
    (problem,) = raised(BEFORE, BEFORE | {model: BEFORE[model] | {"train": new}})
    assert f"{model}, train" in problem
    assert f"{old:,}" in problem
    assert f"{new:,}" in problem


def test_a_lowered_peak_passes_and_so_does_one_within_the_tolerance() -> None:
    assert raised(BEFORE, BEFORE | {"one": {"train": 900_000, "precompute": 504_000}}) == []


def test_a_phase_that_is_no_longer_planned_fails() -> None:
    assert len(raised(BEFORE, {"one": BEFORE["one"]})) == 1


def test_update_writes_what_the_comparison_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "guard.json"
    monkeypatch.setattr(memory_guard, "FILE", file)
    monkeypatch.setattr(memory_guard, "planned_peaks", lambda: BEFORE)
    assert memory_guard.main(["--update"]) == 0
    monkeypatch.setattr(memory_guard, "read", lambda: json.loads(file.read_text()))
    assert memory_guard.main([]) == 0
    monkeypatch.setattr(memory_guard, "planned_peaks", lambda: {"one": BEFORE["one"], "other": {"train": 3_000_000}})
    assert memory_guard.main([]) == 1
    assert "2,000,000 bytes before, 3,000,000 now" in capsys.readouterr().out
