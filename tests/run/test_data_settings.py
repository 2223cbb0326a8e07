"""What the data and the base can be given besides pictures: frozen adapters, class pictures, dropped captions."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import blockskip
from blockskip.store.groups import GroupStore
from tests.run.runs import PROMPT, Run, Runs, Written
from tests.tiny import make_photos

DRAWN: dict[str, Any] = {"num_inference_steps": 2, "height": 32, "width": 32}
ONE = {"train__steps": 1, "train__gradient_accumulation_steps": 1}


@pytest.fixture(scope="module")
def older(flux_runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA on every block, with alpha twice the rank and strong enough to be seen."""
    run = flux_runs.once(skip__front=0, skip__tail=0, train__learning_rate=0.05, lora__lora_alpha=8.0)
    file = tmp_path_factory.mktemp("older") / "older.safetensors"
    shutil.copy(run.file, file)
    return file


@pytest.fixture(scope="module")
def merged(flux_runs: Runs, older: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with that LoRA added to its weights, by hand."""
    folder = tmp_path_factory.mktemp("merged") / "model"
    shutil.copytree(flux_runs.model, folder)
    (file,) = (folder / "transformer").glob("*.safetensors")
    weights, lora = load_file(file), load_file(older)
    for name, a in lora.items():
        if name.endswith(".lora_A.weight"):
            layer = name.removeprefix("transformer.").removesuffix(".lora_A.weight")
            weights[f"{layer}.weight"] += 2.0 * lora[name.replace(".lora_A.", ".lora_B.")] @ a
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def stored(run: Run, keys: list[str]) -> list[dict[str, torch.Tensor]]:
    store = GroupStore(run.output / "cache" / "features")
    return [store.read(key) for key in keys]


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """The distance of two tensors, relative to the norm of the second."""
    return float((one - other).norm() / other.norm())


def test_a_base_adapter_is_part_of_the_base(flux_runs: Runs, older: Path, merged: Path, tmp_path: Path) -> None:
    """In precompute and training it acts as if it were added to the weights; in the output it is not."""
    changes = {"features__keep": True, "lora__dropout": 0.0}
    found = {}
    for name, more in (("plain", {}), ("adapter", {"model__base_adapters": [older]}), ("merged", {"model": merged})):
        with Written() as written:
            run = flux_runs(**changes, **more)
        found[name] = run, stored(run, written.keys["features"])
    (plain, without), (run, features), (reference, expected) = found.values()
    for one, other, base in zip(features, expected, without, strict=True):
        assert one.keys() == {"front.hidden_states", "front.encoder_hidden_states", "tail.residual"}
        for name, value in one.items():
            assert apart(value, other[name]) < 1e-5, name
            assert apart(value, base[name]) > 1e-2, name
    losses, same, other = ([entry["loss"] for entry in item.entries] for item in (run, reference, plain))
    assert losses == pytest.approx(same, rel=1e-4)
    assert all(abs(one - two) > 1e-2 * two for one, two in zip(losses, other, strict=True))
    assert run.tensors.keys() == plain.tensors.keys()
    assert all(apart(value, reference.tensors[name]) < 0.1 for name, value in run.tensors.items() if "lora_B" in name)
    assert run.config["model"]["base_adapters"] == [str(older)]
    # Drawing with the run's folder takes the base adapter too.
    drawn = pixels(blockskip.generate("a dog", run.output, **DRAWN))
    assert np.abs(drawn - pixels(blockskip.generate("a dog", run.output, model=str(merged), **DRAWN))).max() > 1
    alone = tmp_path / "alone.safetensors"
    shutil.copy(run.file, alone)
    (tmp_path / "config.toml").write_text("[data]\ntext_length = 12\n")
    with_merged = pixels(blockskip.generate("a dog", alone, model=merged, **DRAWN))
    without_base = pixels(blockskip.generate("a dog", alone, model=flux_runs.model, **DRAWN))
    assert np.abs(drawn - with_merged).max() <= 1
    assert np.abs(drawn - without_base).max() > 1


def pixels(images: list[Image.Image]) -> np.ndarray:
    return np.stack([np.asarray(image, dtype=np.int16) for image in images])


def test_class_pictures(flux_runs: Runs, tmp_path: Path) -> None:
    """Each group has one picture of the class with the class's caption and weight; the loss is their mean."""
    make_photos(tmp_path / "class", seed=1)
    changes = ONE | {"data__class_images": tmp_path / "class", "data__class_prompt": "a dog"}
    losses = {}
    for weight in (0.0, 1.0, 2.0):
        run = flux_runs(**changes, data__class_weight=weight)
        losses[weight] = run.entries[0]["loss"]
    assert run.result is not None
    (group,) = run.result.prepared.schedule.groups
    assert [(sample.caption, sample.weight) for sample in group.samples] == [(PROMPT, 1.0), ("a dog", 2.0)]
    alone = flux_runs(**ONE).entries[0]["loss"]
    assert losses[0.0] * 2 == pytest.approx(alone, rel=1e-6)
    of_class = 2 * losses[1.0] - alone
    assert of_class > 0
    assert losses[2.0] == pytest.approx((alone + 2 * of_class) / 2, rel=1e-6)
    # And it is the loss of that picture with that caption: the same sample of a run whose subject is the class.
    with Written() as written:
        flux_runs(**changes, features__keep=True)
    assert written.counts == (2, 1, 1)


def test_captions_that_are_all_dropped_are_empty_ones(runs: Runs, tmp_path: Path) -> None:
    shutil.copytree(runs.images, tmp_path / "photos")
    for path in list((tmp_path / "photos").iterdir()):
        path.with_suffix(".txt").write_text("", encoding="utf-8")
    with Written() as written:
        dropped = runs(data__caption_dropout=1.0, data__flip=True)
    assert written.counts[0] == 1
    with pytest.warns(UserWarning, match="is trained without words"):
        empty = runs(images=tmp_path / "photos", data__flip=True)
    assert dropped.metrics == empty.metrics
    assert dropped.adapter == empty.adapter
    assert dropped.metrics != runs.once().metrics


def test_captions_stay_with_their_pictures(flux_runs: Runs, tmp_path: Path) -> None:
    """Each picture's caption is encoded once, and every group has its own picture's."""
    shutil.copytree(flux_runs.images, tmp_path / "photos")
    for path in list((tmp_path / "photos").iterdir()):
        path.with_suffix(".txt").write_text(f"sks dog number {path.stem}", encoding="utf-8")
    with Written() as written:
        run = flux_runs(images=tmp_path / "photos", prompt="not used", train__steps=6)
    assert run.result is not None
    schedule = run.result.prepared.schedule
    assert written.counts[0] == 5
    for group in schedule.groups:
        for sample in group.samples:
            assert sample.caption == f"sks dog number {schedule.pictures[sample.picture].path.stem}"
    assert run.metrics != flux_runs.once(train__steps=6).metrics
