"""No memory, no disk: one sentence that names the phase and what to try, and the same command goes on from there."""

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from blockskip.cli import main
from blockskip.errors import RunError
from blockskip.families import flux
from blockskip.loading import transformer
from blockskip.run import prepare, run
from blockskip.settings import SHORT, from_flat
from blockskip.store import groups
from blockskip.training import checkpoints, loop
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


@pytest.mark.parametrize("phase", KERNELS)
def test_out_of_memory(flux_runs: Runs, phase: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    errors = {"encode text": MemoryError(), "precompute": RuntimeError("DefaultCPUAllocator: can't allocate memory")}
    error = errors.get(phase, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    arguments = command(flux_runs, tmp_path / "out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("blockskip.run.api.write_run_report", lambda result: None)
        fail_at(patch, *KERNELS[phase], error)
        assert main(arguments) == 3
        (told,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("blockskip:")]
        assert f'Out of memory in the phase "{phase}"' in told
        for option in ("--train.gradient-checkpointing", "--features.window", "--resolution", "--skip"):
            assert option in told
        if phase == "train":
            assert Run(tmp_path / "out").state(2)
        assert main([*arguments, "--features.window", "1MiB", "--train.gradient-checkpointing"]) == 0
    # Recomputing in the backward pass draws the same dropout as the forward pass did.
    assert Run(tmp_path / "out").metrics == flux_runs.once().metrics
    assert Run(tmp_path / "out").adapter == flux_runs.once().adapter


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
    given = flux_runs.settings(output=tmp_path / "out", images=tmp_path / "photos")
    values = {SHORT.get(name, name.replace("__", ".")): value for name, value in given.items()}
    prepared = prepare(from_flat({n: str(v) if isinstance(v, Path) else v for n, v in values.items()}))
    for path in (tmp_path / "photos").iterdir():
        path.rename(path.with_name(f"moved-{path.name}"))
    with pytest.raises(RunError, match=r"cannot be read or written .*No such file.*photos"):
        run(prepared)
    assert list((tmp_path / "out" / "cache" / "text").glob("*.safetensors"))
