"""A run that was stopped continues to the same bytes; a continued run takes what may change and refuses the rest."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blockskip.cli import main
from blockskip.errors import RunError, UserError
from blockskip.preview import draw
from blockskip.run.prepare import Prepared
from blockskip.training import loop
from blockskip.training.checkpoints import latest_checkpoint
from tests.run.loads import Loads
from tests.run.runs import Run, Runs, Written
from tests.tiny import make_flux

SIX = {"train__steps": 6, "train__checkpoint_every": 3}
SMALL_PREVIEW = {"preview__num_inference_steps": 1, "preview__height": 32, "preview__width": 32}


class Stop(Exception):
    """What is injected."""


def stop_at(monkeypatch: pytest.MonkeyPatch, call: int, error: BaseException) -> None:
    """Let the ``call``-th micro-step from now on raise; then everything is as before."""
    original, count = loop.training_loss, 0

    def stopping(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == call:
            monkeypatch.setattr(loop, "training_loss", original)
            raise error
        return original(*args, **kwargs)

    monkeypatch.setattr(loop, "training_loss", stopping)


@pytest.mark.parametrize("call", [7, 10])
def test_three_and_three_are_six(runs: Runs, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """Stopped in the first micro-step of step 4, and in the middle of step 5's accumulation."""
    straight = runs.once(**SIX)
    stop_at(monkeypatch, call, Stop())
    output = runs.folder()
    with pytest.raises(Stop):
        runs(output, **SIX)
    stopped = Run(output)
    assert [entry["step"] for entry in stopped.entries] == [1, 2, 3]
    assert not stopped.file.exists()
    assert stopped.state(3) == straight.state(3)
    with Written() as written:
        again = runs(output, **SIX)
    assert written.counts == (0, 0, 0)
    assert again.adapter == straight.adapter
    assert again.metrics == straight.metrics
    assert again.state(6) == straight.state(6)  # the adapter in float32, and every tensor of the optimiser
    rates = [entry["learning_rate"] for entry in again.entries]
    assert rates == sorted(rates[:2]) + sorted(rates[2:], reverse=True)  # warm-up of 2 steps, then the cosine
    assert len(set(rates[1:])) == len(rates[1:]) - 1


def test_the_state_is_that_of_the_step(flux_runs: Runs) -> None:
    """So that the test above could fail: checkpoints of different steps differ in adapter and optimiser."""
    straight = flux_runs.once(**SIX)
    assert straight.state(3)["state.safetensors"] != straight.state(6)["state.safetensors"]
    assert len({entry["loss"] for entry in straight.entries}) == 6


def test_the_same_command_continues(
    flux_runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Ctrl-C, then the same command; and once more from the ``config.toml`` that the run wrote."""
    straight, output = flux_runs.once(**SIX), tmp_path / "out"
    settings = flux_runs.settings(**SIX, features__keep=True)
    command = ["train", "--output", str(output), "--features.keep"]
    command += ["--model", str(settings.pop("model")), "--images", str(settings.pop("images"))]
    command += ["--prompt", settings.pop("prompt")]
    for name, value in settings.items():
        if not isinstance(value, bool):
            command += ["--" + name.replace("__", ".").replace("_", "-"), str(value)]
    stop_at(monkeypatch, 10, KeyboardInterrupt())
    assert main(command) == 130
    assert "the same command goes on" in capsys.readouterr().err
    stop_at(monkeypatch, 5, KeyboardInterrupt())
    assert main(command) == 130
    assert main(["train", "--config", str(output / "config.toml")]) == 0
    assert "Continuing after step 3." in capsys.readouterr().out
    assert Run(output).adapter == straight.adapter
    assert Run(output).metrics == straight.metrics


def test_a_preview_that_was_interrupted_is_drawn(flux_runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    preview = {"preview__prompts": ["a dog"], "preview__every": 2, **SMALL_PREVIEW}
    straight, output = flux_runs(**preview), flux_runs.folder()

    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draw, "decode", stop)
        with pytest.raises(KeyboardInterrupt):
            flux_runs(output, **preview)
    assert len(Run(output).entries) == 2
    again = flux_runs(output, **preview)
    names = {"samples/step-000002-00-0.png", "samples/step-000004-00-0.png"}
    assert {name for name in again.files if name.endswith(".png")} == names
    assert all(again.files[name] == straight.files[name] for name in names)
    assert again.adapter == straight.adapter


def test_a_damaged_checkpoint_is_passed_over(flux_runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    straight, output = flux_runs.once(**SIX), flux_runs.folder()
    stop_at(monkeypatch, 12, Stop())
    with pytest.raises(Stop):
        flux_runs(output, **SIX | {"train__checkpoint_every": 2})
    checkpoints = output / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-000002", "step-000004"]
    newest = checkpoints / "step-000004" / "state.safetensors"
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    (checkpoints / "step-000005.safetensors").write_bytes(b"")
    (checkpoints / "step-old").mkdir()
    again = flux_runs(output, **SIX)
    assert again.adapter == straight.adapter
    assert again.metrics == straight.metrics


def finished(runs: Runs, **changes: Any) -> Path:
    """A copy of a finished run."""
    output = runs.folder()
    shutil.copytree(runs.once(**changes).output, output)
    return output


def test_a_finished_run_is_left_as_it_is(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    preview = {"preview__prompts": ["a dog"], **SMALL_PREVIEW}
    first = runs(**preview)
    before = first.files
    capsys.readouterr()
    with Loads() as loads:
        again = runs(first.output, **preview)
    told = capsys.readouterr().out
    assert "is finished (4 steps)" in told
    assert "Continuing" not in told
    assert again.files == before
    assert {name for name in loads.names if name[0].isupper()} == set()  # folders are hashed, no class is loaded
    assert again.result is not None
    assert again.result.losses == [entry["loss"] for entry in again.entries]
    assert len(again.result.samples) == 1


def test_more_steps_continue(flux_runs: Runs) -> None:
    """Ten steps after four are as good as ten at once, when the learning rate does not know the total."""
    constant = {"train__lr_scheduler": "constant"}
    output = finished(flux_runs, **constant)
    with Loads() as loads:
        more = flux_runs(output, **constant, train__steps=6)
    assert "CLIPTextModel" in loads.names  # the cache was removed at the end of the first run
    straight = flux_runs.once(**constant, train__steps=6)
    assert more.metrics == straight.metrics
    assert more.tensors.keys() == straight.tensors.keys()
    assert more.adapter == straight.adapter


@pytest.mark.parametrize("scheduler", ["cosine", "linear"])
def test_more_steps_are_learnt_from(flux_runs: Runs, scheduler: str) -> None:
    """A schedule that has come to its end goes on with the curve of the new total, never with zero."""
    changes = {"train__lr_scheduler": scheduler}
    output = finished(flux_runs, **changes)
    more = flux_runs(output, **changes, train__steps=8)
    rates = [entry["learning_rate"] for entry in more.entries]
    assert len(rates) == 8
    assert all(rate > 0 for rate in rates)
    assert rates[4] > rates[3]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert all((more.tensors[name] != value).any() for name, value in flux_runs.once(**changes).tensors.items())


def test_another_learning_rate_is_applied(flux_runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    output = flux_runs.folder()
    stop_at(monkeypatch, 10, Stop())
    with pytest.raises(Stop):
        flux_runs(output, **SIX, train__lr_scheduler="constant")
    again = flux_runs(output, **SIX, train__lr_scheduler="constant", train__learning_rate=5e-3)
    assert [entry["learning_rate"] for entry in again.entries] == [5e-3, 1e-2, 1e-2, 5e-3, 5e-3, 5e-3]
    assert again.config["train"]["learning_rate"] == 5e-3


def other_model(runs: Runs, folder: Path) -> dict[str, Any]:
    return {"model": make_flux(folder / "model", layers=2, single_layers=2, seed=1)}


def other_pixel(runs: Runs, folder: Path) -> dict[str, Any]:
    shutil.copytree(runs.images, folder / "photos")
    (folder / "photos" / "1.png").write_bytes((runs.images / "3.png").read_bytes())
    return {"images": folder / "photos"}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda *_: {"lora__rank": 8}, ["lora.rank", "lora.lora_alpha"]),
        (lambda *_: {"lora__dropout": 0.2, "train__seed": 1}, ["lora.dropout", "train.seed"]),
        (lambda *_: {"skip__front": 1}, ["skip.front"]),
        (lambda *_: {"prompt": "a photo of a cat"}, ["data.prompt", "the pictures and captions"]),
        (other_pixel, ["the pictures and captions"]),
        (other_model, ["base model"]),
    ],
    ids=["rank", "two", "split", "prompt", "pictures", "model"],
)
def test_what_was_learnt_with_is_kept(
    flux_runs: Runs, tmp_path: Path, change: Callable[[Runs, Path], dict[str, Any]], named: list[str]
) -> None:
    output = finished(flux_runs)
    before = Run(output).files
    with Loads() as loads, pytest.raises(UserError) as caught:
        flux_runs(output, **change(flux_runs, tmp_path))
    assert {name for name in loads.names if name[0].isupper()} == set()
    problems = caught.value.problems
    assert len(problems) == len(named)
    for problem, name in zip(problems, named, strict=True):
        assert f"another {name};" in problem
        assert "another output folder." in problem
    assert Run(output).files == before


def test_what_does_not_matter_may_change(flux_runs: Runs, tmp_path: Path) -> None:
    """The same pictures and the same model in other folders, other memory settings, previews."""
    output = finished(flux_runs)
    before = Run(output)
    adapter, metrics = before.adapter, before.metrics
    shutil.copytree(flux_runs.model, tmp_path / "model")
    shutil.copytree(flux_runs.images, tmp_path / "photos")
    again = flux_runs(
        output, model=tmp_path / "model", images=tmp_path / "photos", features__window="1MiB", features__disk="1MiB",
        train__checkpoint_every=1, preview__prompts=["a dog"], **SMALL_PREVIEW,
    )  # fmt: skip
    assert again.adapter == adapter
    assert again.metrics == metrics
    assert len(list((output / "samples").glob("*.png"))) == 1


def test_a_run_that_did_not_know_a_setting_had_its_default(flux_runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer version goes on where an older one, without that key, stopped; but only with the key's default."""
    fingerprint = Prepared.fingerprint
    with monkeypatch.context() as patched:
        patched.setattr(
            Prepared, "fingerprint",
            lambda self: {name: value for name, value in fingerprint(self).items() if name != "lora.freeze_a"},
        )  # fmt: skip
        older = flux_runs(train__steps=1)
    assert "lora.freeze_a" not in latest_checkpoint(older.output / "checkpoints").fingerprint
    with pytest.raises(UserError, match=r"another lora\.freeze_a"):
        flux_runs(older.output, train__steps=2, lora__freeze_a=True)
    assert flux_runs(older.output, train__steps=2).metrics.count(b"\n") == 2


def test_an_adapter_without_checkpoints_is_not_overwritten(flux_runs: Runs) -> None:
    output = finished(flux_runs)
    shutil.rmtree(output / "checkpoints")
    before = Run(output).files
    with pytest.raises(UserError, match="holds a finished adapter without checkpoints; use another output folder"):
        flux_runs(output)
    assert Run(output).files == before


def test_a_run_that_cannot_go_on_keeps_its_checkpoint(flux_runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of ours in the middle: what was saved before is there, and the run can be finished."""
    output = flux_runs.folder()
    stop_at(monkeypatch, 5, RunError("The disk is full."))
    with pytest.raises(RunError):
        flux_runs(output, train__checkpoint_every=1)
    assert Run(output).state(2)
    assert flux_runs(output).adapter == flux_runs.once().adapter
