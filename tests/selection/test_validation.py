"""The trainings of a selection and of its validation: what each is of, and what its figures are computed from."""

import shutil
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from blockskip.adapters.frozen import FrozenAdapters
from blockskip.data.pictures import find_pictures
from blockskip.loading.source import ModelSource
from blockskip.method.split import Split
from blockskip.run.fixed import fixed_samples, heldout_loss
from blockskip.run.previews import open_pictures
from blockskip.selection.model import Model, open_for
from blockskip.selection.subjects import Subject, trained
from blockskip.selection.validate import neighbours, validate
from tests.families.groups import CPU
from tests.selection.short import with_short_texts
from tests.selection.small import Pixels, request

TRAINING = {
    "train.steps": 2, "train.gradient_accumulation_steps": 1, "train.learning_rate": 1e-2, "lora.rank": 2,
    "data.text_length": 40,
}  # fmt: skip
CAPTION = "a photo of sks dog"
#: The chosen split, those with one or two blocks moved, in their order; the paper's shares are among them.
SPLITS = [(2, 2), (0, 4), (1, 3), (3, 1), (4, 0)]


@pytest.fixture
def subject(photos: Path, tmp_path: Path) -> Subject:
    """Three pictures to train on and two that are kept back."""
    paths = find_pictures(photos)
    for name, some in (("train", paths[:3]), ("kept", paths[3:5])):
        (tmp_path / name).mkdir()
        for path in some:
            shutil.copy(path, tmp_path / name)
    return Subject("dog", tmp_path / "train", CAPTION, ("a cat", CAPTION), tuple(find_pictures(tmp_path / "kept")))


@pytest.fixture
def model(flux_folder: Path, tmp_path: Path) -> Model:
    source = with_short_texts(flux_folder, tmp_path / "model")
    return open_for(request(source.folder, tmp_path, (), seed=3, training=TRAINING))


def settings_of(run: Path) -> dict[str, Any]:
    return tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))


def loss(model: Model, pictures: list[Path], adapter: Path | None) -> float:
    """Flow-matching loss at the nine noise levels, of the whole model."""
    source: ModelSource = model.source
    samples = fixed_samples(source, pictures, [CAPTION] * len(pictures), model.size, torch.float32, CPU, seed=3)
    adapters = None if adapter is None else FrozenAdapters([str(adapter)])
    return float(np.mean(heldout_loss(source, adapters, samples, torch.float32, CPU)))


def fidelity(drawn: list[Path], real: list[Path]) -> float:
    """The mean cosine of all pairs."""
    one, other = (Pixels().embed(open_pictures(paths)) for paths in (drawn, real))
    return float((one @ other.T).mean())


def test_a_validation_s_figures_are_those_of_its_own_trainings(model: Model, subject: Subject) -> None:
    """Each with its split, on the training pictures alone; its loss and likeness on those kept back, from the base."""
    entry = {"ratio": 0.5, "skipped": 4, "front": 2, "tail": 2, "paper_shares": [3, 1]}
    found = validate(model, 0.5, {"splits": [entry]}, [subject])
    assert [(row["front"], row["tail"]) for row in found["splits"]] == SPLITS
    folder, heldout = model.request.folder / "validation" / "dog", list(subject.heldout)
    assert subject.images is not None
    learnt, base = find_pictures(subject.images), loss(model, heldout, None)
    rows = {(0, 0): found["plain"]} | {(row["front"], row["tail"]): row for row in found["splits"]}
    for pair, row in rows.items():
        run = folder / ("plain" if pair == (0, 0) else f"{pair[0]}-{pair[1]}")
        settings = settings_of(run)
        assert (settings["skip"]["front"], settings["skip"]["tail"]) == pair
        assert settings["patches"]["direction"] == "fixed"
        assert Path(settings["data"]["images"]) == subject.images
        adapter = run / "adapter" / "pytorch_lora_weights.safetensors"
        expected = loss(model, heldout, adapter) / base - 1
        assert row["heldout_change"] == [pytest.approx(expected, abs=1e-6)]
        assert row["mean_heldout_change"] == row["heldout_change"][0]
        on_learnt = loss(model, learnt, adapter) / loss(model, learnt, None) - 1
        assert abs(expected) > 1e-5 and abs(on_learnt - expected) > 1e-5
        drawn = sorted((run / "samples").glob("*.png"))
        assert len(drawn) == 4
        assert row["fidelity"] == [pytest.approx(fidelity(drawn, heldout), abs=1e-6)]
        assert abs(fidelity(drawn, learnt) - fidelity(drawn, heldout)) > 1e-4
    changes = [row["heldout_change"][0] for row in rows.values()]
    assert len(set(changes)) == len(changes), "or one training could stand for another"
    best = min(SPLITS, key=lambda pair: rows[pair]["heldout_change"][0])
    assert (found["chosen"], found["best_by_heldout_loss"]) == ([2, 2], list(best))


def test_the_tuned_models_of_a_selection_are_plain_lora(model: Model, subject: Subject) -> None:
    """Every block trained, the whole pictures, at the size that is drawn."""
    (one,) = trained(model, [subject])
    settings = settings_of(one.adapter.parent.parent)
    assert (settings["skip"]["front"], settings["skip"]["tail"]) == (0, 0)
    assert settings["patches"]["direction"] == "fixed"
    assert settings["data"]["resolution"] == settings["data"]["full_resolution"] == 32
    assert settings["train"]["steps"] == 2 and settings["lora"]["rank"] == 2


def test_neighbours_are_within_two_blocks_and_inside_the_model() -> None:
    assert neighbours(Split(2, 2), 4) == [Split(*pair) for pair in SPLITS]
    assert neighbours(Split(0, 3), 3) == [Split(0, 3), Split(1, 2), Split(2, 1)]
    assert neighbours(Split(5, 1), 6, [Split(0, 6)]) == [
        Split(5, 1),
        Split(3, 3),
        Split(4, 2),
        Split(6, 0),
        Split(0, 6),
    ]
