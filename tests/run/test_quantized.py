"""Whole runs on a quantised middle: what they give, what they share with other runs, and what they refuse."""

import sys
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from blockskip.adapters.frozen import FrozenAdapters
from blockskip.cli import main
from blockskip.errors import UserError
from blockskip.loading.source import open_model
from blockskip.loading.transformer import load_transformer
from blockskip.training import loop
from tests.families.groups import CPU, distance, forward_inputs, group
from tests.run.loads import Loads
from tests.run.runs import PROMPT, Run, Runs, Written


@pytest.fixture(params=["int8", "nf4"])
def quantized(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"model__quantization": request.param, "train__checkpoint_every": 2}


def losses(run: Run) -> torch.Tensor:
    return torch.tensor([entry["loss"] for entry in run.entries])


def test_a_run_gives_an_adapter_for_the_unquantised_model(runs: Runs, quantized: dict[str, Any]) -> None:
    """Its losses are near those of the unquantised run and not the same; the pipeline takes the file as any other."""
    run, plain = runs.once(**quantized), runs.once()
    assert 1e-5 < distance(losses(run), losses(plain)) < 0.1
    assert run.tensors.keys() == plain.tensors.keys()
    assert {str(value.dtype) for value in run.tensors.values()} == {"torch.float32"}
    assert all(bool(value.any()) for value in run.tensors.values())
    assert run.header["blockskip.quantization"] == quantized["model__quantization"]
    assert plain.header["blockskip.quantization"] == "none"
    source = open_model(str(runs.model))
    inputs = forward_inputs(source, group(source))
    pipeline = getattr(diffusers, source.family.pipeline_class).from_pretrained(runs.model)
    with torch.no_grad():
        base = pipeline.transformer(**inputs)[0]
        pipeline.load_lora_weights(run.file.parent)
        adapted = pipeline.transformer(**inputs)[0]
        ours = load_transformer(source, [], torch.float32, CPU, FrozenAdapters([str(run.file)]))(**inputs)[0]
    assert distance(adapted, base) > 1e-4
    assert torch.equal(ours, adapted)


def test_an_interrupted_run_continues_to_the_same_bytes(
    runs: Runs, quantized: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    straight, output = runs.once(**quantized), runs.folder()
    original, left = loop.training_loss, [5]

    def stopping(*args: Any) -> torch.Tensor:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "training_loss", stopping)
        with pytest.raises(KeyboardInterrupt):
            runs(output, **quantized)
    assert len(Run(output).entries) == 2
    again = runs(output, **quantized)
    assert again.adapter == straight.adapter
    assert again.metrics == straight.metrics


def test_features_are_shared_with_the_unquantised_run(
    flux_runs: Runs, quantized: dict[str, Any], tmp_path: Path
) -> None:
    with Written() as written:
        flux_runs(features__cache=tmp_path / "cache")
    assert written.counts[2] > 0
    with Written() as written:
        run = flux_runs(**quantized, features__cache=tmp_path / "cache")
    assert written.counts == (0, 0, 0)
    assert run.adapter == flux_runs.once(**quantized).adapter


def test_a_run_is_not_continued_with_another_quantisation(flux_runs: Runs) -> None:
    output = flux_runs.folder()
    flux_runs(output, model__quantization="nf4", train__steps=2)
    for other in ("int8", "none"):
        with pytest.raises(UserError, match=r"another model\.quantization; use the same value"):
            flux_runs(output, model__quantization=other)


@pytest.mark.parametrize("quantization", ["int8", "nf4"])
def test_without_the_library_a_sentence_says_what_to_install(
    flux_runs: Runs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    quantization: str,
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    command = ["train", "--model", str(flux_runs.model), "--images", str(flux_runs.images), "--prompt", PROMPT]
    command += ["--output", str(tmp_path / "out"), "--model.quantization", quantization]
    with Loads() as loads:
        assert main(command) == 2
    assert loads.names == []
    assert not (tmp_path / "out").exists()
    sentence = f'model.quantization = "{quantization}" needs bitsandbytes: pip install "dit-blockskip[quantization]".'
    assert capsys.readouterr().err == f"blockskip: {sentence}\n"
