"""No memory, no disk: one sentence that names the phase and what to try, and the same command goes on from there."""

import errno
import re
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from blockskip.cli import main
from blockskip.errors import OutOfMemory, RunError
from blockskip.families import flux
from blockskip.loading import transformer
from blockskip.preview import draw
from blockskip.run import job, out_of_memory, previews, run
from blockskip.run.planned import plan_run
from blockskip.store import groups
from blockskip.training import checkpoints, loop
from blockskip.training.checkpoints import latest_checkpoint
from tests.run.runs import Run, Runs

KERNELS: dict[str, tuple[Any, str, int]] = {
    "encode text": (flux.Flux, "encode_text", 2),
    "encode pictures": (flux.Flux, "encode_pixels", 5),
    "precompute": (transformer, "run_block", 9),
    "train": (loop, "training_loss", 6),
}


def command(runs: Runs, output: Path) -> list[str]:
    settings = runs.settings(output=output, train__checkpoint_every=1)
    options = {"--" + name.replace("__", ".").replace("_", "-"): str(value) for name, value in settings.items()}
    return ["train", *(part for option in options.items() for part in option)]


def fail_at(patch: pytest.MonkeyPatch, owner: Any, name: str, call: int, error: Exception) -> None:
    """Let the ``call``-th call of a function raise."""
    original, count = getattr(owner, name), 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == call:
            raise error
        return original(*args, **kwargs)

    patch.setattr(owner, name, failing)


def allocated(size: int) -> Exception:
    """The error that this machine gives for an allocation that is too large for it."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(size, dtype=torch.uint8)
    return caught.value


def screen(printed: str) -> list[str]:
    """The lines from our own name on."""
    lines = printed.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("blockskip:"))
    return lines[first:]


@pytest.mark.parametrize("phase", KERNELS)
def test_out_of_memory(flux_runs: Runs, phase: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """One screen: phase, planned, measured, what is safe, three things to try; what it names goes on from there."""
    errors = {
        "encode text": MemoryError(),
        "encode pictures": RuntimeError("MPS backend out of memory. Tried to allocate 2.50 GB on private pool."),
        "precompute": allocated(2**47),
    }
    error = errors.get(phase, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"))
    asked = {"encode pictures": "2.50 GiB", "precompute": "131072 GiB", "train": "2.00 GiB"}.get(phase)
    output = tmp_path / "out"
    arguments = command(flux_runs, output)
    assert plan_run(flux_runs.prepared(output, train__checkpoint_every=1))  # it runs the same kernels; now it is known
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("blockskip.run.api.write_run_report", lambda result: None)
        fail_at(patch, *KERNELS[phase], error)
        assert main(arguments) == 3
        told = screen(capsys.readouterr().err)
        assert len(told) <= 12 and all(len(line) <= 100 for line in told if "/checkpoints/" not in line)
        assert told[0] == f'blockskip: Out of memory in the phase "{phase}".'
        state = dict(line.split(maxsplit=1) for line in told if line.startswith("  ") and line[2] not in "123")
        assert re.fullmatch(r"[0-9.]+ [KM]iB of memory", state["planned"])
        assert re.match(r"[0-9.]+ ([KM]i)?B at most", state["measured"])
        assert state["measured"].endswith("at most" if asked is None else f"at most, when {asked} more was asked for")
        assert re.match(r"[0-9.]+ [GM]iB of [0-9.]+ GiB on this machine", state["free"])
        there = f'"{output / "checkpoints" / "step-000002"}" is whole: 2 of 4 steps'
        none = "none yet; what was encoded and precomputed is kept"
        assert state["checkpoint"] == (there if phase == "train" else none)
        shown = [line for line in told if re.match(r"  \d\. ", line)]
        assert [line[:5] for line in shown] == ["  1. ", "  2. ", "  3. "] and told[-3:] == shown
        expected = {"encode text": "--model.stream-text-encoders", "train": "--train.stream-middle"}.get(phase)
        options = [expected] if expected else []
        assert all(any(f" {option}: " in line and " planned" in line for line in shown) for option in options)
        if phase == "train":
            assert latest_checkpoint(output / "checkpoints").step == 2  # type: ignore[union-attr]
        assert main([*arguments, *options, "--features.window", "1MiB", "--train.gradient-checkpointing"]) == 0
    # Recomputing in the backward pass draws the same dropout as the forward pass did.
    assert Run(tmp_path / "out").metrics == flux_runs.once().metrics
    assert Run(tmp_path / "out").adapter == flux_runs.once().adapter


def test_plans_of_what_to_try_are_made_when_the_model_is_gone(
    flux_runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models: list[weakref.ref[nn.Module]] = []
    alive: list[int] = []
    load, plan = job.load_transformer, out_of_memory.make_plan

    def loaded(*args: Any, **kwargs: Any) -> nn.Module:
        model = load(*args, **kwargs)
        models.append(weakref.ref(model))
        return model

    def planned(*args: Any, **kwargs: Any) -> Any:
        alive.append(sum(model() is not None for model in models))
        return plan(*args, **kwargs)

    monkeypatch.setattr(job, "load_transformer", loaded)
    monkeypatch.setattr(out_of_memory, "make_plan", planned)
    fail_at(monkeypatch, loop, "training_loss", 3, MemoryError())
    with pytest.raises(OutOfMemory):
        flux_runs(tmp_path / "out", planned=True)
    assert models and alive and set(alive) == {0}


def test_the_screen_needs_no_plan(flux_runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails after the failure is left out."""
    fail_at(monkeypatch, loop, "training_loss", 3, MemoryError())
    for name in ("make_plan", "latest_checkpoint"):
        fail_at(monkeypatch, out_of_memory, name, 1, MemoryError())
    monkeypatch.setattr(out_of_memory, "PATIENCE", 0.0)
    with pytest.raises(OutOfMemory) as caught:
        flux_runs(tmp_path / "out", memory__host="100GiB")
    told = str(caught.value).splitlines()
    assert "  planned     unknown" in told and "  budget      100 GiB" in told
    assert f'  checkpoint  the last one in "{tmp_path / "out" / "checkpoints"}" is whole' in told
    assert told[-3:-1] == ["  1. --train.gradient-checkpointing", "  2. --train.stream-middle"]


def test_a_preview_without_memory_ends_no_run(flux_runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(previews, "draw", lambda *args: torch.empty(2**47, dtype=torch.uint8))
        run = flux_runs(planned=True, preview__prompts=["a dog"], preview__height=32, preview__width=32)
    told = capsys.readouterr().out
    assert re.search(r"Warning: the preview at step 4 failed \(.*allocate.*\); training is not affected\.\n"
                     r'Out of memory in the phase "preview"\.\n', told)  # fmt: skip
    assert "1. --preview.stream: " in told
    assert run.adapter == flux_runs.once().adapter


def test_out_of_memory_in_generate(flux_runs: Runs, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["generate", "--model", str(flux_runs.model), "--prompt", "a dog", "--output", str(tmp_path / "out")]
    with pytest.MonkeyPatch.context() as patch:
        fail_at(patch, draw, "denoise", 1, allocated(2**47))
        assert main([*arguments, "--height", "64", "--width", "64", "--batch-size", "2"]) == 3
    told = screen(capsys.readouterr().err)
    assert told[0] == 'blockskip: Out of memory in the phase "generate".'
    assert re.match(r"  planned +[0-9.]+ MiB$", told[1]) and "131072 GiB more was asked for" in told[2]
    assert re.match(r"  1\. --stream: [0-9.]+ [KM]iB planned", told[-3])


def test_out_of_memory_elsewhere(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("blockskip.run.api.prepare", fail)
    assert main(["train", "--images", "x", "--output", "y"]) == 3
    (told,) = screen(capsys.readouterr().err)
    assert "Out of memory outside the phases of a run ([Errno 12] Cannot allocate memory)" in told


def test_a_full_disk_while_storing(flux_runs: Runs, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    arguments = command(flux_runs, tmp_path / "out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("blockskip.run.api.write_run_report", lambda result: None)
        fail_at(patch, groups, "write_tensors", 12, full)
        assert main(arguments) == 1
        told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("blockskip:")]
        assert len(told) == 1 and "is full" in told[0] and "features.cache" in told[0]
        assert not list((tmp_path / "out").rglob("*.tmp"))
        assert main(arguments) == 0
    assert Run(tmp_path / "out").adapter == flux_runs.once().adapter


def test_a_checkpoint_that_cannot_be_written_is_told(flux_runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """One on the way is left out and the run goes on; the last one must be written."""
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.MonkeyPatch.context() as patch:
        fail_at(patch, checkpoints, "write_tensors", 2, full)
        run = flux_runs(train__checkpoint_every=1, train__checkpoints_total_limit=0)
    assert "the checkpoint of step 2 could not be written" in capsys.readouterr().out
    assert run.adapter == flux_runs.once().adapter
    assert run.metrics == flux_runs.once().metrics
    assert sorted(path.name[-1] for path in (run.output / "checkpoints").iterdir()) == ["1", "3", "4"]


def test_a_picture_that_is_gone_is_named(flux_runs: Runs, tmp_path: Path) -> None:
    """It was there when the run was checked."""
    shutil.copytree(flux_runs.images, tmp_path / "photos")
    prepared = flux_runs.prepared(tmp_path / "out", images=tmp_path / "photos")
    for path in (tmp_path / "photos").iterdir():
        path.rename(path.with_name(f"moved-{path.name}"))
    with pytest.raises(RunError, match=r"cannot be read or written .*No such file.*photos"):
        run(prepared)
    assert list((tmp_path / "out" / "cache" / "text").glob("*.safetensors"))
