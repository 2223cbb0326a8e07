"""What a run tells of its memory in log, files and report: planned beside measured, loudly beyond a budget."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from blockskip import measure
from blockskip.measure import Peaks, PhaseRecord
from blockskip.planner.budget import Budget
from blockskip.planner.plan import PhasePlan, Plan
from blockskip.run import RunResult, planned
from blockskip.run.summary import write_run_report
from blockskip.run.watch import Watch
from blockskip.settings import from_flat
from blockskip.training import loop
from tests.run.runs import Runs

MIB = 2**20
MEASURED = 700 * MIB


def record(name: str, host: float, device: float = 0, reserved: float = 0) -> PhaseRecord:
    """A phase; sizes in MiB."""
    return PhaseRecord(name, 1.0, int(host * MIB), 0, int(device * MIB), int(reserved * MIB))


def watch(planned: dict[str, Peaks] | None = None, **budget: float) -> Watch:
    """Budgets in MiB."""
    return Watch(planned or {}, Budget(**{name: int(size * MIB) for name, size in budget.items()}), "--{}".format)


def told(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_a_line_when_a_phase_ends_first_and_when_it_has_grown(capsys: pytest.CaptureFixture[str]) -> None:
    seen = watch({"train": Peaks(598 * MIB)})
    for size in (612, 612, 590, 620, 700, 710):
        seen.ended(record("train", size))
    assert told(capsys) == [
        "train: 612 MiB measured, 598 MiB planned (+2%)", "train: 700 MiB measured, 598 MiB planned (+17%)"
    ]  # fmt: skip
    seen.ended(record("preview", 45))
    assert told(capsys) == ["preview: 45.0 MiB measured"]


def test_an_accelerator_has_figures_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    seen = watch({"train": Peaks(400 * MIB, 1000 * MIB)})
    seen.ended(record("train", 300, 1010, 1200))
    assert told(capsys) == [
        "train: 1010 MiB measured, 1000 MiB planned (+1%), 1.17 GiB reserved on the device; "
        "on the host 300 MiB measured, 400 MiB planned (-25%)"
    ]


def test_where_memory_is_one_the_host_figures_count(capsys: pytest.CaptureFixture[str]) -> None:
    """Apple's GPUs report what is allocated, and are planned as a part of the host."""
    watch({"train": Peaks(400 * MIB)}).ended(record("train", 410, 200, 200))
    assert told(capsys) == ["train: 410 MiB measured, 400 MiB planned (+2%)"]


@pytest.mark.parametrize(("budget", "kind"), [("host", "memory"), ("device", "device memory"), ("disk", "disk space")])
def test_five_percent_over_the_budget_is_quiet_and_more_is_loud(
    budget: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = watch(**{budget: 100})
    for size, loud in ((99, False), (104.9, False), (105.2, True), (106, False), (120, True)):
        if budget == "disk":
            seen.written(int(size * MIB))
        else:
            seen.ended(record("train", size if budget == "host" else 0, size if budget == "device" else 0, 1))
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WARNING: ")]
        assert len(lines) == loud, (size, lines)
        for line in lines:
            phase = "the run" if budget == "disk" else "train"
            advice = "--disk" if budget == "disk" else "--train"
            assert re.fullmatch(
                rf"WARNING: {phase} took 1\d\d MiB of {kind}, its budget is 100 MiB \(\+\d+%\)\. Try {advice}\.", line
            )


def test_what_earlier_processes_took_is_not_told_again_and_counts(capsys: pytest.CaptureFixture[str]) -> None:
    seen = watch({"train": Peaks(50 * MIB), "precompute": Peaks(7)}, host=100)
    seen.known([record("train", 130)], {"train": Peaks(80 * MIB), "precompute": Peaks(90 * MIB)})
    seen.ended(record("train", 60))
    assert told(capsys) == []
    assert seen.planned == {"train": Peaks(80 * MIB), "precompute": Peaks(7)}  # of precompute nothing was measured
    assert [item.measured for item in seen.overruns([record("train", 130)])] == [130 * MIB]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process takes 700 MiB from the first training step on, and nothing before."""
    level, original = [0], loop.training_loss

    def step(*args: Any, **kwargs: Any) -> Any:
        level[0] = MEASURED
        return original(*args, **kwargs)

    monkeypatch.setattr(measure, "host_memory", lambda: (level[0], 0))
    monkeypatch.setattr(measure, "_highest_ever", lambda: 0)
    monkeypatch.setattr(loop, "training_loss", step)


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(("megabytes", "loud"), [(670, False), (660, True)])
def test_a_run_beyond_its_budget(
    flux_runs: Runs, megabytes: int, loud: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """700 MiB are 4.5% more than 670 and 6% more than 660."""
    run = flux_runs(planned=True, memory__host=f"{megabytes}MiB", train__gradient_checkpointing=True)
    result = run.result
    assert isinstance(result, RunResult)
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("train: ")]
    assert re.fullmatch(r"train: 700 MiB measured, \S+ [KM]iB planned \(\+\d+%\)", line)
    warned = [line for line in lines if line.startswith("WARNING")]
    sentence = "train took 700 MiB of memory, its budget is 660 MiB (+6%). Try --train.stream-middle or --model."
    assert len(warned) == 2 * loud and all(sentence in line for line in warned)  # as the phase ends, and at the end
    if loud:
        assert lines.index(line) < lines.index(warned[0]) and lines[-1] == warned[1]
    assert [item.phase for item in result.overruns] == ["train"] * loud
    page = write_run_report(result).read_text(encoding="utf-8")
    assert ("WARNING: more than the budget" in page) == loud and (sentence in page) == loud
    assert run.adapter == flux_runs.once().adapter


@pytest.mark.usefixtures("measured")
def test_the_plan_is_kept_beside_what_was_measured(flux_runs: Runs) -> None:
    run = flux_runs(planned=True, preview__prompts=["a dog"], preview__height=32, preview__num_inference_steps=1)
    assert run.result is not None
    kept = json.loads((run.output / "phases.json").read_text(encoding="utf-8"))
    phases = ["encode text", "encode pictures", "precompute", "train", "preview"]
    assert list(kept["planned"]) == phases == [entry["name"] for entry in kept["phases"]]
    assert {name: Peaks(**peaks) for name, peaks in kept["planned"].items()} == run.result.planned
    assert all(peaks.host > 0 and not peaks.device for peaks in run.result.planned.values())
    page = write_run_report(run.result).read_text(encoding="utf-8").replace("\N{NO-BREAK SPACE}", " ")
    assert re.search(r"Planned</th>\s*<th[^>]*>Measured</th>\s*<th[^>]*>Difference</th>", page)
    assert re.search(r"train</th>\s*<td>[0-9.]+ [KM]iB</td>\s*<td>700 MiB</td>\s*<td>\+\d+%</td>", page)
    again = flux_runs(run.output, preview__prompts=["a dog"], preview__height=32, preview__num_inference_steps=1)
    assert again.result is not None
    assert again.result.planned == run.result.planned  # read back: this time nothing was planned


def test_a_plan_that_fails_costs_a_sentence(
    flux_runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("no kernel\nfor fake tensors")

    monkeypatch.setattr(planned, "make_plan", fail)
    run = flux_runs(planned=True)
    lines = capsys.readouterr().out.splitlines()
    assert (
        "Warning: this run could not be planned (NotImplementedError: no kernel for fake tensors); "
        "its memory is only measured."
    ) in lines
    (line,) = [line for line in lines if line.startswith("train: ")]
    assert line.endswith(" measured")
    assert run.adapter == flux_runs.once().adapter and run.metrics == flux_runs.once().metrics


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, Budget()),
        ({"memory__device": "2GiB", "memory__host": "1GiB", "memory__disk": "3GiB"}, Budget(None, 2**30, 3 * 2**30)),
        ({"memory__device": "2GiB"}, Budget(None, 2 * 2**30, None)),
    ],
)
def test_the_budget_of_one_memory_is_the_smaller(given: dict[str, str], expected: Budget) -> None:
    config = from_flat({name.replace("__", "."): value for name, value in given.items()})
    assert planned.budget_of(config, torch.device("cpu")) == expected
    apart = planned.budget_of(config, torch.device("cuda"))
    assert (apart.device is not None) == ("memory__device" in given)
    assert (apart.host is not None) == ("memory__host" in given)


def test_the_plan_is_made_for_the_runs_own_groups_and_captions(flux_runs: Runs, tmp_path: Path) -> None:
    for changes in ({}, {"features__pool": 3, "data__caption_dropout": 0.5}, {"patches__shape": "picture"}):
        prepared = flux_runs.prepared(tmp_path, **changes)
        setting = planned.setting_of(prepared)
        assert setting.groups == len(prepared.schedule.groups)
        assert setting.captions == len(prepared.schedule.captions())
        assert setting.size in {group.size for group in prepared.schedule.groups}
        assert (setting.split, list(setting.targets)) == (prepared.split, prepared.targets)
        assert (setting.dtype, setting.device) == (prepared.dtype, prepared.device)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_checkpoints_are_written_in_training(device: str) -> None:
    """The larger of the two counts; a phase that the run has not is left out."""
    phases = {
        "precompute": PhasePlan(9, host_peak_bytes=90, used=False),
        "train": PhasePlan(5, host_peak_bytes=70),
        "save": PhasePlan(6, host_peak_bytes=60),
    }
    plan = Plan("m", device, "float32", (1, 1), 4, {}, phases)
    assert planned.peaks_of(plan) == {"train": Peaks(70, 6 if device == "cuda" else 0)}
    assert planned.peaks_of(None) == {}
