"""Runs whose next block is copied beside the computation, and those that were told not to: the same bytes."""

from typing import Any

import pytest
import torch

from blockskip.loading.ahead import ReadAhead
from blockskip.loading.source import open_model
from blockskip.run.large import plan_drawing, preview_drawing
from blockskip.settings import from_flat
from tests.run.runs import PROMPT, Runs

VISITING: dict[str, Any] = {
    "train__stream_middle": True, "preview__stream": True, "preview__prompts": [PROMPT], "preview__height": 32,
    "preview__width": 32, "preview__num_inference_steps": 1,
}  # fmt: skip


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """As on a device of its own: a line for each pass, or model, whose next block is copied."""
    found: list[torch.device] = []
    begin = ReadAhead.__init__

    def watched(ahead: ReadAhead, read: Any, following: Any, device: torch.device) -> None:
        found.append(device)
        begin(ahead, read, following, device)

    monkeypatch.setattr("blockskip.loading.ahead.reads_ahead", lambda device: True)
    monkeypatch.setattr(ReadAhead, "__init__", watched)
    return found


def test_wherever_blocks_visit_the_next_one_is_copied_unless_told_not_to(
    flux_runs: Runs, copies: list[torch.device]
) -> None:
    copied = flux_runs(**VISITING)
    assert len(copies) >= 3  # precompute, training, preview
    copies.clear()
    alone = flux_runs(**VISITING, model__read_ahead=False)
    assert copies == []
    assert alone.adapter == copied.adapter
    pictures = [name for name in copied.files if name.endswith(".png")]
    assert pictures
    assert all(alone.files[name] == copied.files[name] for name in pictures)


def test_it_may_be_set_when_a_run_is_continued(flux_runs: Runs, copies: list[torch.device]) -> None:
    output = flux_runs.folder()
    flux_runs(output, train__steps=2, train__lr_scheduler="constant", **VISITING)
    copies.clear()
    again = flux_runs(output, train__lr_scheduler="constant", model__read_ahead=False, **VISITING)
    assert copies == []
    assert len(again.entries) == 4


def test_a_refusal_of_previews_counts_the_blocks_that_are_there(flux_runs: Runs) -> None:
    source, device = open_model(str(flux_runs.model)), torch.device("cuda")
    planned = []
    for ahead in (True, False):
        values = {name.replace("__", "."): value for name, value in VISITING.items()} | {"model.read_ahead": ahead}
        drawing = preview_drawing(from_flat(values), 12)
        assert drawing.read_ahead is ahead
        planned.append(plan_drawing(source, drawing, torch.float32, device))
    assert planned[0].device_peak_bytes >= planned[1].device_peak_bytes
    assert planned[0] != planned[1]
