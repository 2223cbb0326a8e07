"""Whole runs on features stored as int8: near those of exact features, of a key of their own, half as large."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from blockskip.errors import RunError
from blockskip.features import precompute as module
from blockskip.method.skipping import Features, span_features
from tests.families.groups import distance
from tests.run.runs import Run, Runs, Written

INT8: dict[str, Any] = {"features__dtype": "int8"}
ENDS: dict[str, Any] = {"skip__front": 1, "skip__tail": 1, "model__dtype": "bfloat16"}


def losses(run: Run) -> torch.Tensor:
    return torch.tensor([entry["loss"] for entry in run.entries])


def test_a_run_on_int8_features_is_near_the_exact_one(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    exact = runs.once(**ENDS)
    capsys.readouterr()
    run = runs(**ENDS, **INT8)
    told = [line for line in capsys.readouterr().out.splitlines() if "relative error in the first group" in line]
    assert len(told) == 1
    assert "front.hidden_states 0.0" in told[0] and "tail.residual 0.0" in told[0]
    assert 1e-5 < distance(losses(run), losses(exact)) < 0.02
    norms = [torch.tensor([entry["grad_norm"] for entry in one.entries]) for one in (run, exact)]
    assert distance(*norms) < 0.05
    assert run.tensors.keys() == exact.tensors.keys()


def test_each_kind_of_features_has_keys_and_files_of_its_own(flux_runs: Runs, tmp_path: Path) -> None:
    shared: dict[str, Any] = {"features__cache": tmp_path, **ENDS}
    sizes = {}
    for kind in ("auto", "int8"):
        before = {path.name for path in (tmp_path / "features").glob("*.safetensors")}
        with Written() as written:
            flux_runs(**shared, features__dtype=kind)
        assert written.counts[2] == 8  # of two accumulated in four steps
        new = [path for path in (tmp_path / "features").glob("*.safetensors") if path.name not in before]
        sizes[kind] = sum(value.nbytes for path in new for value in load_file(path).values())
        with Written() as written:
            again = flux_runs(**shared, features__dtype=kind)
        assert written.counts == (0, 0, 0)
        assert len(again.entries) == 4
    assert sizes["int8"] == sizes["auto"] / 2 * (32 + 4) / 32  # a token has 32 values here


def test_the_front_is_exact_without_int8_and_not_with_it(flux_runs: Runs) -> None:
    """Against the same blocks kept in memory and run."""
    front: dict[str, Any] = {"skip__front": 2, "skip__tail": 0, "model__dtype": "bfloat16"}
    kept = flux_runs.once(**front, skip__front_mode="keep")
    assert flux_runs.once(**front).metrics == kept.metrics
    assert flux_runs.once(**front, **INT8).metrics != kept.metrics


def test_features_that_are_not_finite_stop_the_run_as_ever(flux_runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(*args: Any) -> Features:
        features = span_features(*args)
        features["front.hidden_states"][0, 1, 2] = math.nan
        return features

    monkeypatch.setattr(module, "span_features", spoiled)
    for kind in ({}, INT8):
        with pytest.raises(RunError, match="not finite in 5 steps in a row"):
            flux_runs(**ENDS, **kind, train__steps=6)
