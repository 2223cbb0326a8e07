"""Runs whose text encoders are streamed learn, draw and continue as the others do, byte for byte."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blockskip
from blockskip.cli import main
from blockskip.loading.encoders import StreamedEncoder
from tests.run.runs import PROMPT, Runs

STREAMED = {"model__stream_text_encoders": True}
PREVIEW: dict[str, Any] = {
    "preview__prompts": [PROMPT, "another"], "preview__num_inference_steps": 1, "preview__height": 32,
    "preview__width": 32,
}  # fmt: skip


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The parts that are streamed from now on."""
    found: list[str] = []
    begin = StreamedEncoder.__init__

    def watched(encoder: StreamedEncoder, source: Any, part: str, *args: Any) -> None:
        found.append(part)
        begin(encoder, source, part, *args)

    monkeypatch.setattr(StreamedEncoder, "__init__", watched)
    return found


def test_a_streamed_run_is_the_same_run(runs: Runs, opened: list[str]) -> None:
    plain = runs.once(**PREVIEW)
    assert opened == []
    streamed = runs(**PREVIEW, **STREAMED)
    assert streamed.adapter == plain.adapter
    assert streamed.metrics == plain.metrics
    pictures = {name: value for name, value in plain.files.items() if name.endswith(".png")}
    assert len(pictures) == 2
    assert {name: value for name, value in streamed.files.items() if name.endswith(".png")} == pictures
    parts = ["text_encoder", "text_encoder_2"][: len(set(opened))]
    assert opened == parts * 2  # for the captions, and for the prompts of the previews
    assert streamed.config["model"]["stream_text_encoders"] is True


def test_it_may_be_set_when_a_run_is_continued(flux_runs: Runs, opened: list[str]) -> None:
    output = flux_runs.folder()
    flux_runs(output, train__steps=2, features__keep=True, train__lr_scheduler="constant")
    again = flux_runs(output, **STREAMED, train__lr_scheduler="constant")
    assert opened == []  # the prompts had been stored, under the very keys
    assert len(again.entries) == 4


def test_generate_streams_both(flux_runs: Runs, opened: list[str], tmp_path: Path) -> None:
    call: dict[str, Any] = {"model": flux_runs.model, "height": 32, "width": 32, "num_inference_steps": 1}
    (plain,) = blockskip.generate(PROMPT, **call)
    assert opened == []
    (streamed,) = blockskip.generate(PROMPT, **call, stream=True)
    assert opened == ["text_encoder", "text_encoder_2"]
    assert np.array_equal(np.asarray(plain), np.asarray(streamed))
    options = ["--height", "32", "--width", "32", "--num-inference-steps", "1", "--output", str(tmp_path / "one.png")]
    assert main(["generate", "--model", str(flux_runs.model), "--prompt", PROMPT, "--stream", *options]) == 0
    assert opened == ["text_encoder", "text_encoder_2"] * 2
