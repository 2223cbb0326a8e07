"""Whole runs whose patches keep their places in their pictures (`patches.positions = "picture"`)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import blockskip
from blockskip.cli import main
from blockskip.errors import UserError
from blockskip.run import job
from blockskip.training import loop
from tests.run.runs import Runs
from tests.tiny import make_photos

PICTURE = {"patches__positions": "picture"}
PAIR = PICTURE | {"train__batch_size": 2, "data__flip": True}


def test_whole_pictures_give_the_same_bytes(flux_runs: Runs, tmp_path: Path) -> None:
    """Trained at their own size they have the plain positions, and nothing differs; resized ones have others."""
    for number in range(3):
        Image.new("RGB", (32, 32), (80 * number, 90, 120)).save(tmp_path / f"{number}.png")
    whole: dict[str, Any] = {"images": tmp_path, "data__full_resolution": 32, "data__resolution": 32}
    plain, placed = flux_runs(**whole), flux_runs(**whole, **PICTURE)
    assert placed.adapter == plain.adapter
    assert placed.metrics == plain.metrics
    assert placed.config["patches"]["positions"] == "picture"
    assert plain.config["patches"]["positions"] == "patch"
    assert flux_runs.once(**PICTURE).metrics != flux_runs.once().metrics


def test_what_is_precomputed_and_trained_has_the_places_of_the_schedule(
    flux_runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, list[torch.Tensor | None]] = {"precompute": [], "train": []}
    read, loss = job._Job._input, loop.training_loss
    monkeypatch.setattr(job._Job, "_input", lambda *a: kept(read(*a), "precompute"))
    monkeypatch.setattr(loop, "training_loss", lambda *a: loss(*a[:3], kept(a[3], "train"), *a[4:]))

    def kept(one: Any, phase: str) -> Any:
        given[phase].append(one.places)
        return one

    run = flux_runs(**PAIR)
    assert run.result is not None
    expected = run.result.prepared.places
    assert len(expected) == len(given["train"]) == 8
    for phase in given.values():
        for found, places in zip(phase[-8:], expected, strict=True):
            assert found is not None and places is not None
            assert torch.equal(found, places)
    sides = torch.cat([places for places in expected if places is not None])[:, 2:]
    assert sides.min() >= 4 and sides.max() <= 8  # tokens of 8 pixels; patches of 32 to 64
    given["train"].clear()
    flux_runs(train__steps=1)
    assert given["train"] == [None, None]


@pytest.mark.parametrize(
    "changes",
    [
        {"train__stream_middle": True},
        {"features__window": "1B"},
        {"features__disk": "60KiB"},
        {"train__stream_middle": True, "train__gradient_checkpointing": True},
    ],
    ids=str,
)
def test_ways_of_running_give_the_same_bytes(flux_runs: Runs, changes: dict[str, Any]) -> None:
    expected, run = flux_runs.once(**PAIR), flux_runs(**PAIR, **changes)
    assert run.adapter == expected.adapter
    assert run.metrics == expected.metrics


def test_a_front_is_exact_with_places_too(flux_runs: Runs) -> None:
    """Trained with its stored features as if its blocks were kept and run."""
    only = PAIR | {"skip__front": 2, "skip__tail": 0, "lora__dropout": 0.0}
    stored, kept = flux_runs(**only), flux_runs(**only, skip__front_mode="keep")
    assert stored.metrics == kept.metrics
    assert all(torch.equal(value, kept.tensors[name]) for name, value in stored.tensors.items())


def test_patches_of_the_pictures_aspect_and_of_the_class(flux_runs: Runs, tmp_path: Path) -> None:
    """Two samples a group, each with the place of its own picture; previews are drawn as ever."""
    make_photos(tmp_path / "class", seed=1)
    changes = PICTURE | {
        "patches__shape": "picture", "data__class_images": tmp_path / "class", "data__class_prompt": "a dog",
        "preview__prompts": ["a dog"], "preview__num_inference_steps": 1, "preview__height": 32, "preview__width": 32,
    }  # fmt: skip
    run = flux_runs(**changes, planned=True)
    assert run.result is not None
    places = [group for group in run.result.prepared.places if group is not None]
    assert all(group.shape == (2, 4) for group in places)
    assert any(group[0, 2] != group[0, 3] for group in places)
    assert run.result.planned
    assert not run.result.overruns
    assert len(run.result.samples) == 1


def test_a_run_does_not_go_on_with_other_positions(flux_runs: Runs) -> None:
    output = flux_runs.folder()
    flux_runs(output, train__steps=1)
    with pytest.raises(UserError, match=r"another patches\.positions"):
        flux_runs(output, train__steps=2, **PICTURE)


@pytest.mark.parametrize("verb", ["train", "plan"])
def test_a_model_without_positions_is_refused_before_it_is_loaded(
    sana_runs: Runs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setattr("blockskip.loading.source.ModelSource.load", lambda *_: pytest.fail("something was loaded"))
    output = sana_runs.folder()
    arguments = [verb, "--model", str(sana_runs.model), "--images", str(sana_runs.images), "--prompt", "a dog"]
    if verb == "train":
        arguments += ["--output", str(output)]
    code = main([*arguments, "--patches.positions", "picture", "--train.steps", "1"])
    assert code == 2
    told = capsys.readouterr().err
    assert told.count("patches.positions") == 1
    assert "(flux, flux2, flux2_klein, chroma, hidream, longcat_image, ovis_image, bria); sana is not" in told
    assert not output.exists()
    with pytest.raises(UserError, match="sana is not"):
        blockskip.train(**sana_runs.settings(output=output, **PICTURE))
