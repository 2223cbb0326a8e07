"""Two runs never write one output folder at once."""

import os
from pathlib import Path

import pytest

from blockskip.cli import main
from blockskip.locks import locked
from tests.run.loads import Loads
from tests.run.runs import PROMPT, Runs


def test_a_folder_in_which_another_process_runs_is_left_alone(
    flux_runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "train", "--model", str(flux_runs.model), "--images", str(flux_runs.images), "--prompt", PROMPT, "--steps", "1",
        "--data.full-resolution", "64", "--device", "cpu", "--output", str(tmp_path),
    ]  # fmt: skip
    with locked(tmp_path / "run.lock"), Loads() as loads:
        before = sorted(tmp_path.iterdir())
        code = main(command)
        assert sorted(tmp_path.iterdir()) == before
    assert (code, loads.names) == (2, [])
    assert capsys.readouterr().err.splitlines()[-1] == (
        f'blockskip: "{tmp_path}" is in use: process {os.getpid()} trains in it; wait for its end, '
        "or take another output folder."
    )


def test_a_run_holds_its_folder_and_leaves_nothing_of_that(flux_runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    output, held = flux_runs.folder(), []

    def look(*_: object) -> None:
        held.extend(path.name for path in output.glob("run.*"))
        raise KeyError

    with monkeypatch.context() as patched:
        patched.setattr("blockskip.run.job.open_output", look)
        with pytest.raises(KeyError):
            flux_runs(output)
    assert sorted(held) == ["run.lock", "run.pid"] and not list(output.iterdir())
