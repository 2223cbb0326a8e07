"""A selection on tiny models: planted importance is found, an interrupted one goes on, bad input is told first."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

import blockskip.selection.pictures as pictures_module
from blockskip.adapters.files import FILE_NAME
from blockskip.data.pictures import find_pictures
from blockskip.errors import UserError
from blockskip.evaluation.intervals import rank_correlation
from blockskip.keys import file_sha256
from blockskip.loading.source import open_model
from blockskip.loading.transformer import StreamedTransformer, empty_transformer
from blockskip.method.selection import best_split, masked_sets
from blockskip.method.split import Split
from blockskip.selection.job import select, table_text, validation_text
from blockskip.selection.request import Request
from blockskip.selection.result import Sweep
from blockskip.selection.subjects import subjects as all_subjects
from blockskip.selection.validate import validation_subjects
from blockskip.selection.velocity import SIGMAS, Velocities
from tests.planted import cut_text
from tests.selection.small import SMALL, Pixels, request
from tests.tiny import randomise
from tests.tiny_families import ALIKE, NEAR, TINY

#: Blocks that alone carry the text, of ten.
CARRY = (5, 6, 7)


def planted(folder: Path, target: Path) -> Path:
    """A copy of a tiny pipeline with ten blocks, of which three alone let the image see the text."""
    shutil.copytree(folder, target)
    source = open_model(str(folder))
    layout, config = source.family.layout, source.config("transformer")
    missing = 10 - layout.count(empty_transformer(source))
    cls = getattr(diffusers, source.family.transformer_class)
    model = cls.from_config(dict(config, **TINY[source.family.name].more_blocks(config, missing)))
    randomise(model, seed=3)
    with torch.no_grad():
        for index, block in enumerate(layout.blocks(model)):
            if index not in CARRY:
                cut_text(block, layout)
    shutil.rmtree(target / "transformer")
    model.save_pretrained(target / "transformer")
    return target


def test_planted_importance_is_found_by_both_probes(
    request_fixture: Path, tmp_path: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("job", "result", "velocity"):
        monkeypatch.setattr(f"blockskip.selection.{module}.SIGMAS", (0.3, 0.7))
    model, subject = planted(request_fixture, tmp_path / "model"), tmp_path / "red_dog"
    subject.mkdir()
    shutil.copy(next(path for path in sorted(photos.iterdir()) if path.suffix != ".txt"), subject)
    training = SMALL["training"] | {"train.learning_rate": 1e-9}  # or LoRA would carry text in every block
    found = select(
        request(
            model, tmp_path, (str(subject),), prompts=("{} in the snow",), ratios=(0.7,), window=1, images_per_prompt=1,
            training=training,
        )
    )  # fmt: skip
    assert set(found["blocks"]) != {0} and sum(found["blocks"]) == 10
    velocity = found["other_probes"]["velocity"]
    # a byte of a pixel may be rounded the other way, so the pictures' share of nothing is larger
    for sweeps, nothing in ((found["distances"], 1e-3), (velocity, 1e-4)):
        window = [entry["mean"] for entry in sweeps["window"]]
        least = min(window[index] for index in CARRY)
        assert [index for index, mean in enumerate(window) if mean > nothing * least] == list(CARRY)
        assert all(entry["mean"] < nothing * least for entry in sweeps["front"][:5] + sweeps["back"][:2])
        assert all(entry["mean"] > 0.1 * least for entry in sweeps["front"][5:] + sweeps["back"][2:])
    alone = [entry["mean"] for entry in velocity["block"]]
    assert [index for index, mean in enumerate(alone) if mean > 1e-3 * max(alone)] == list(CARRY)
    split = found["splits"][0]
    assert (split["skipped"], split["front"], split["tail"]) == (7, 5, 2)
    assert split["chosen_in"] == {"5, 2": 1.0}
    assert split["other_probes"] == {"velocity": [5, 2]}
    assert (found["attention"]["to"], found["attention"]["words"]) == ("the subject", ["sks red dog"])
    assert all(0 < entry["mean"] < 1 for entry in found["attention"]["blocks"])


@pytest.fixture(params=[name for name in TINY if name not in ALIKE | NEAR])
def request_fixture(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.getfixturevalue(f"{request.param}_folder")
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, flux_folder: Path, subjects: tuple[str, str]) -> Any:
    """A selection of the tiny FLUX model, its request, and the model's bytes before and after."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr("blockskip.run.job.plan_run", lambda prepared: None)
    monkeypatch.setattr("blockskip.selection.job.open_encoder", lambda name, device: Pixels())
    output = tmp_path_factory.mktemp("selection")
    own = request(flux_folder, output, subjects, ratios=(0.25, 0.5), window=3)
    before = {path: path.read_bytes() for path in flux_folder.rglob("*") if path.is_file()}
    found = select(own)
    monkeypatch.undo()
    return own, found, before


def test_what_is_written(whole: Any, flux_folder: Path) -> None:
    own, found, before = whole
    assert json.loads(own.output.read_text()) == found
    assert found["blocks"] == [3, 5] and found["family"] == "flux" and found["probe"] == "pictures"
    assert [len(found["distances"][kind]) for kind in ("front", "back", "window")] == [4, 4, 6]
    for kind in ("front", "back", "window"):
        for entry in found["distances"][kind]:
            assert 0 < entry["low"] <= entry["mean"] <= entry["high"]
    for entry in found["splits"]:
        sweeps = ([0.0, *(item["mean"] for item in found["distances"][kind])] for kind in ("front", "back"))
        assert Split(entry["front"], entry["tail"]) == best_split(*sweeps, entry["skipped"])
        assert sum(entry["chosen_in"].values()) == pytest.approx(1)
    made = found["made_with"]
    assert [item["subject"] for item in made["adapters"]] == ["red_dog", "cat"]
    assert made["adapters"][0]["caption"] == "a photo of sks red dog"
    assert made["adapters"][0]["prompts"] == ["a photo of sks red dog in the snow", "a cat"]
    assert made["steps"] == 2 and made["training"] == SMALL["training"]
    assert len(made["versions"]["torch"]) > 3 and made["window"] == 3 and made["text_length"] > 0
    assert made["guidance"] == {"input": 1.0, "classifier_free": 1.0}
    assert made["velocity"] == {"sigmas": list(SIGMAS), "pictures_of_each": 2, "seed": 0, "guidance_input": 1.0}
    for item, folder in zip(made["adapters"], own.images, strict=True):
        assert item["pictures"] == [file_sha256(path) for path in find_pictures(Path(folder))]
        assert len(set(item["pictures"])) == 2
    assert set(found["agreement"]["velocity"]) == {"front", "back", "window", "splits of 2", "splits of 4"}
    attention = found["attention"]
    assert attention["to"] == "the subject" and attention["words"] == ["sks red dog", "sks cat"]
    assert np.shape(attention["by_sigma"]) == (len(SIGMAS), 8)
    means = [entry["mean"] for entry in attention["blocks"]]
    assert means == pytest.approx(np.mean(attention["by_sigma"], axis=0))
    windows = np.asarray([sum(means[start : start + 3]) for start in range(6)])
    distances = np.asarray([entry["mean"] for entry in found["distances"]["window"]])
    assert attention["agreement"]["pictures"]["window"] == pytest.approx(rank_correlation(windows, distances))
    assert set(attention["agreement"]["pictures"]) == {"window", "splits of 2", "splits of 4"}
    assert set(attention["agreement"]["velocity"]) == {"window", "single blocks", "splits of 2", "splits of 4"}
    for entry in found["splits"]:
        front = [0.0, *np.cumsum(means)]
        back = [0.0, *np.cumsum(means[::-1])]
        assert Split(*attention["splits"][str(entry["ratio"])]) == best_split(front, back, entry["skipped"])
    for name in ("curves.png", "heatmap.png", "contact.png"):
        with Image.open(own.folder / name) as picture:
            assert np.asarray(picture.convert("L")).std() > 5
    text = table_text(found)
    assert "25%" in text and "50%" in text and "rank correlation of velocity with pictures" in text
    assert before == {path: path.read_bytes() for path in flux_folder.rglob("*") if path.is_file()}


def test_noise_levels_are_not_resampled() -> None:
    """Only pictures are drawn by chance: where they agree, the interval is a point, however levels differ."""
    distances = np.broadcast_to(np.asarray([0.1, 0.9])[:, None], (2, 3, 2, 4))
    found = Velocities(distances, distances, ())
    sweep = Sweep.of(masked_sets(2, 1, 1)[:4], found.by_picture())
    for kind in ("front", "back", "window"):
        for entry in sweep.entries(kind):
            assert entry["low"] == entry["mean"] == entry["high"] == pytest.approx(0.5)


def test_the_same_again_and_nothing_is_computed_twice(whole: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own, found, _ = whole
    monkeypatch.setattr(pictures_module, "draw", None)
    monkeypatch.setattr("blockskip.selection.velocity.fixed_samples", None)
    assert select(own) == found


def test_an_interrupted_selection_goes_on(
    whole: Any, tmp_path: Path, flux_folder: Path, subjects: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, found, _ = whole
    loras = tuple(str(own.folder / "loras" / name) for name in ("red_dog", "cat"))
    again = replace(own, output=tmp_path / "selection.json", loras=loras, images=())
    calls: list[str] = []
    original = pictures_module.draw

    def draw(source: Any, drawing: Any, *arguments: Any) -> Any:
        calls.append(drawing.prompts[0])
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(source, drawing, *arguments)

    monkeypatch.setattr(pictures_module, "draw", draw)
    with pytest.raises(KeyboardInterrupt):
        select(again)
    assert not again.output.exists()
    with (again.folder / "distances.jsonl").open("a") as stream:
        stream.write('{"key": "cut o')
    result = select(again)
    assert calls[:2] == ["a photo of sks red dog in the snow", "a cat"] and len(calls) == 5
    assert result["distances"] == found["distances"] and result["splits"] == found["splits"]
    assert result["other_probes"] == found["other_probes"]


def test_streamed_and_in_other_batches_the_choice_is_the_same(
    whole: Any, tmp_path: Path, flux_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the blocks are read once for eight batches, of which each has masks of its own."""
    read: list[int] = []
    block = StreamedTransformer.block

    def counted(self: StreamedTransformer, index: int, *args: Any) -> Any:
        read.append(index)
        return block(self, index, *args)

    monkeypatch.setattr(StreamedTransformer, "block", counted)
    own, found, _ = whole
    loras = tuple(str(own.folder / "loras" / name) for name in ("red_dog", "cat"))
    again = replace(own, output=tmp_path / "selection.json", loras=loras, images=(), stream=True, batch_size=5)
    result = select(again)
    drawn, probed = 2 * 15, 2 * (15 + 8)  # two seeds or pictures, with every set of blocks
    passes = [math.ceil(math.ceil(count / 5) / 8) for count in (drawn, probed)]  # batches of 5, eight together
    reads = 2 * (2 * 2 * passes[0] + len(SIGMAS) * (passes[1] + 1))  # subjects, prompts, steps; attention has its own
    assert len(read) == 8 * reads
    for kind in ("front", "back", "window"):
        for one, other in zip(result["distances"][kind], found["distances"][kind], strict=True):
            assert one["mean"] == pytest.approx(
                other["mean"], abs=2e-3
            )  # a byte of a pixel may be rounded the other way
        for one, other in zip(
            result["other_probes"]["velocity"][kind], found["other_probes"]["velocity"][kind], strict=True
        ):
            assert one["mean"] == pytest.approx(other["mean"], rel=1e-4)
    assert [(entry["front"], entry["tail"]) for entry in result["splits"]] == [
        (entry["front"], entry["tail"]) for entry in found["splits"]
    ]


def test_the_adapter_takes_part(whole: Any, tmp_path: Path) -> None:
    """Another adapter gives other distances: it is the tuned model that is looked into."""
    own, _, _ = whole
    one = str(own.folder / "loras" / "red_dog")
    alone = select(replace(own, output=tmp_path / "a.json", loras=(one,), images=(), probes=("velocity",)))
    changed = tmp_path / "strong" / "adapter"
    shutil.copytree(own.folder / "loras" / "red_dog" / "adapter", changed)
    shutil.copy(own.folder / "loras" / "red_dog" / "config.toml", changed.parent)
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(changed / FILE_NAME, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    tensors = {name: value if "lora_A" in name else torch.randn(value.shape) for name, value in tensors.items()}
    save_file(tensors, changed / FILE_NAME, metadata)
    other = select(
        replace(own, output=tmp_path / "b.json", loras=(str(changed.parent),), images=(), probes=("velocity",))
    )
    assert alone["probe"] == other["probe"] == "velocity" and not alone["other_probes"]
    assert alone["distances"]["front"][1]["mean"] != pytest.approx(other["distances"]["front"][1]["mean"], rel=1e-2)


def test_validation_compares_the_choice_with_its_neighbours(
    whole: Any, subjects: tuple[str, str], photos: Path, tmp_path: Path
) -> None:
    own, _, _ = whole
    with pytest.raises(UserError, match="put at least 3 into it"):
        select(replace(own, output=tmp_path / "other.json"), validated=0.5)
    folder = tmp_path / "red_dog"
    shutil.copytree(photos, folder)
    few = replace(own, images=(str(folder),), output=tmp_path / "selection.json", probes=("velocity",), window=0)
    found = select(few, validated=0.5)["validation"]
    assert found["subjects"] == ["red_dog"]
    pictures = {path.name for path in find_pictures(folder)}
    learnt = {path.name for path in find_pictures(few.folder / "validation" / "pictures" / "red_dog")}
    assert len(pictures) == 5 and len(learnt) == 4 and learnt < pictures
    (subject,) = validation_subjects(few, all_subjects(few))
    assert {path.name for path in subject.heldout} == pictures - learnt
    splits = [(row["front"], row["tail"]) for row in found["splits"]]
    assert splits[0] == tuple(found["chosen"]) and len(set(splits)) == len(splits) >= 3
    assert all(front + tail == 4 for front, tail in splits)
    for row in found["splits"]:
        assert len(row["heldout_change"]) == len(row["fidelity"]) == 1
    best = min(found["splits"], key=lambda row: row["mean_heldout_change"])
    assert found["best_by_heldout_loss"] == [best["front"], best["tail"]]
    plain = found["plain"]
    assert len(plain["heldout_change"]) == len(plain["fidelity"]) == 1
    changes = [row["heldout_change"] for row in (plain, *found["splits"])]
    assert all(-1 < value < 1 and value != 0 for row in changes for value in row)
    assert plain["mean_fidelity"] == plain["fidelity"][0]
    assert "chosen" in validation_text(found) and f"{plain['mean_fidelity']:.3f}" in validation_text(found)


def test_validation_takes_subjects_that_the_selection_does_not_see() -> None:
    seen = [item.name for item in all_subjects(Request(count=4))]
    others = [item.name for item in validation_subjects(Request(count=4), [])]
    assert len(others) == 2 and not set(seen) & set(others)
    with pytest.raises(UserError, match="lower --count, which is 11"):
        validation_subjects(Request(count=11), [])
