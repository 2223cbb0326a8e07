"""Pictures that the memory of this machine, or of its device, cannot hold are refused before anything is loaded."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blockskip.cli import main
from blockskip.errors import UserError
from blockskip.loading.source import ModelSource
from blockskip.preview.draw import Drawing
from blockskip.run import large
from blockskip.run.large import check_drawing
from tests.run.loads import Loads
from tests.run.runs import Runs

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GIB = 2**30


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The heights that were planned: 3 GiB of the host and 2 of the device; there are 4 of both."""
    heights: list[int] = []

    def plan(source: ModelSource, drawing: Drawing, *_: Any) -> Any:
        heights.append(drawing.height or 0)
        return SimpleNamespace(host_peak_bytes=3 * GIB, device_peak_bytes=2 * GIB)

    monkeypatch.setattr(large, "plan_drawing", plan)
    memory = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(total=3 * GIB),
                             swap_memory=lambda: SimpleNamespace(total=GIB))  # fmt: skip
    monkeypatch.setattr(large, "psutil", memory)
    monkeypatch.setattr(large, "free_memory", lambda device: (0, 4 * GIB))
    return heights


def of(side: int) -> Drawing:
    return Drawing(("a dog",), height=side, width=side)


def test_only_pictures_that_are_very_large_are_planned(flux: ModelSource, planned: list[int]) -> None:
    for side in (64, 2048, 2056):
        check_drawing(flux, of(side), torch.float32, CPU)
    assert planned == [2056]


@pytest.mark.parametrize(("device", "kind", "place"), [(CPU, "host", "this machine"), (CUDA, "device", "the device")])
def test_what_does_not_fit_is_told(
    flux: ModelSource, planned: list[int], monkeypatch: pytest.MonkeyPatch, device: torch.device, kind: str, place: str
) -> None:
    check_drawing(flux, of(4096), torch.float32, device)
    peaks = {"host_peak_bytes": GIB, "device_peak_bytes": GIB, f"{kind}_peak_bytes": 5 * GIB}
    monkeypatch.setattr(large, "plan_drawing", lambda *_: SimpleNamespace(**peaks))
    with pytest.raises(UserError) as caught:
        check_drawing(flux, of(4096), torch.float32, device, "preview.")
    assert caught.value.problems == [
        "preview.height = 4096 and preview.width = 4096 take 5.00 GiB of memory, by the plan, "
        f"and {place} has 4.00 GiB; take a smaller picture, or set preview.stream."
    ]
    with pytest.raises(UserError, match=r"; take a smaller picture\.$"):
        check_drawing(flux, dataclasses.replace(of(4096), stream=True), torch.float32, device)


def test_what_cannot_be_planned_is_tried(flux: ModelSource, planned: list[int], monkeypatch: Any) -> None:
    monkeypatch.setattr(large, "plan_drawing", lambda *_: {}["no plan"])
    check_drawing(flux, of(4096), torch.float32, CPU)


def test_a_huge_picture_is_refused_before_anything_is_loaded(
    flux_runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", "--model", str(flux_runs.model), "--prompt", "x", "--output", str(tmp_path / "drawn")]
    with Loads() as loads:
        assert main([*command, "--height", "100000", "--width", "100000", "--device", "cpu"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("blockskip: height = 100000 and width = 100000 take ") and "; take a smaller" in line
        with pytest.raises(
            UserError, match=r"^preview\.height = 100000 and preview\.width = 100000 take .* smaller pic"
        ):
            flux_runs.prepared(tmp_path / "out", preview__prompts=["x"], preview__height=100000, preview__width=100000)
    assert all(name[0].islower() for name in loads.names)  # no class: in the parts' folders, the files' headers alone
    assert not list(tmp_path.iterdir())
