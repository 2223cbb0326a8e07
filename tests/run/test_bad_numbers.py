"""Losses that are not finite, and training that changes nothing."""

import json
from typing import Any

import pytest
import torch

from blockskip.errors import RunError
from blockskip.training import loop
from tests.run.runs import Run, Runs


def spoil(monkeypatch: pytest.MonkeyPatch, steps: set[int], value: float) -> None:
    """Multiply the loss of the second micro-batch of some steps (from 1) by a value."""
    original, count = loop.training_loss, 0

    def spoiled(*args: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        loss: torch.Tensor = original(*args)
        return loss * value if count % 2 == 0 and count // 2 in steps else loss

    monkeypatch.setattr(loop, "training_loss", spoiled)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_bad_step_is_left_out_and_told(
    flux_runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: float
) -> None:
    spoil(monkeypatch, {3}, value)
    run = flux_runs(train__checkpoint_every=1, train__checkpoints_total_limit=0)
    assert "1 step was left out because the loss or its gradient was not finite." in capsys.readouterr().out
    assert [entry["loss"] is None for entry in run.entries] == [False, False, True, False]
    assert b"NaN" not in run.metrics and b"Infinity" not in run.metrics
    assert [json.loads(run.state(step)["checkpoint.json"])["skipped_steps"] for step in (2, 3, 4)] == [0, 1, 1]
    states = [run.state(step)["state.safetensors"] for step in (2, 3, 4)]
    assert states[0] == states[1] != states[2]
    assert all(bool(torch.isfinite(value).all()) for value in run.tensors.values())
    assert run.result is not None
    assert len(run.result.losses) == 3


def test_the_count_outlives_a_stop(
    flux_runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = flux_runs.folder()
    with pytest.MonkeyPatch.context() as patch:
        spoil(patch, {1, 2}, float("nan"))
        patch.setattr(loop.Trainer, "checkpoint", stop_after(loop.Trainer.checkpoint))
        with pytest.raises(KeyboardInterrupt):
            flux_runs(output, train__checkpoint_every=2)
    capsys.readouterr()
    flux_runs(output)
    assert "2 steps were left out because the loss or its gradient was not finite." in capsys.readouterr().out


def stop_after(function: Any) -> Any:
    def stop(*args: Any) -> None:
        function(*args)
        raise KeyboardInterrupt

    return stop


def test_many_bad_steps_end_the_run(flux_runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, set(range(2, 10)), float("nan"))
    output = flux_runs.folder()
    with pytest.raises(RunError, match="not finite in 5 steps in a row, the last of them step 6") as caught:
        flux_runs(output, train__steps=9, train__checkpoint_every=1)
    assert caught.value.exit_code == 1
    run = Run(output)
    assert not run.file.exists()
    assert run.state(5)
    assert "learning_rate" in str(caught.value)


def test_training_that_changes_nothing_is_an_error(flux_runs: Runs) -> None:
    output = flux_runs.folder()
    with pytest.raises(RunError, match=r"changed nothing: every lora_B is still zero\. Is train\.learning_rate too"):
        flux_runs(output, train__learning_rate=1e-60)
    assert not Run(output).file.exists()


def test_an_adapter_that_is_not_finite_is_not_saved(flux_runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    output = flux_runs.folder()
    state = loop.Trainer.state
    monkeypatch.setattr(loop.Trainer, "state", lambda self: {name: v / 0 for name, v in state(self).items()})
    with pytest.raises(RunError, match=r"values that are not finite .* lower train\.learning_rate"):
        flux_runs(output, train__steps=1)
    assert not Run(output).file.exists()
