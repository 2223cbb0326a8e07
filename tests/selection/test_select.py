"""A selection on tiny models: planted importance is found, an interrupted one goes on, bad input is told first."""

import json
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
from blockskip.loading.source import open_model
from blockskip.loading.transformer import empty_transformer
from blockskip.method.layout import BlockLayout
from blockskip.method.selection import best_split
from blockskip.method.split import Split
from blockskip.selection.job import select, table_text, validation_text
from blockskip.selection.request import Request
from blockskip.selection.subjects import subjects as all_subjects
from blockskip.selection.validate import validation_subjects
from tests.tiny import randomise

#: Blocks that alone carry the text, of ten.
CARRY = (5, 6, 7)
SMALL: dict[str, Any] = {
    "prompts": ("{} in the snow", "a cat"), "images_per_prompt": 2, "steps": 2, "height": 32, "width": 32, "count": 2,
    "training": {"train.steps": 1, "train.gradient_accumulation_steps": 1, "lora.rank": 2, "data.text_length": 12},
}  # fmt: skip


class Pixels:
    """An encoder that forgets nothing: the picture's own bytes, centred."""

    name = "pixels"

    def embed(self, images: list[Image.Image] | torch.Tensor) -> torch.Tensor:
        rows = torch.stack([torch.from_numpy(np.array(image.resize((32, 32)))).double().flatten() for image in images])
        return torch.nn.functional.normalize(rows - 128, dim=1)


@pytest.fixture(autouse=True)
def only_what_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder of our own, and no plans of the trainings, which would take longer than they."""
    monkeypatch.setattr("blockskip.run.job.plan_run", lambda prepared: None)
    monkeypatch.setattr("blockskip.selection.job.open_encoder", lambda name, device: Pixels())
    monkeypatch.setattr("blockskip.selection.validate.open_encoder", lambda name, device: Pixels())


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory, photos: Path) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("subjects")
    for name in ("red_dog", "cat"):
        (folder / name).mkdir()
        for photo in sorted(path for path in photos.iterdir() if path.suffix != ".txt")[:2]:
            shutil.copy(photo, folder / name)
    return str(folder / "red_dog"), str(folder / "cat")


def cut_text(block: torch.nn.Module, layout: BlockLayout) -> None:
    """Let a block add nothing that it attends to to its image stream."""
    attention = getattr(block, layout.cross or "attn")
    if getattr(attention, "to_out", None) is not None:
        attention.to_out[0].weight.zero_()
        attention.to_out[0].bias.zero_()
    else:  # FLUX's single blocks: one layer for attention and feed-forward
        block.proj_out.weight[:, : attention.inner_dim].zero_()


def planted(folder: Path, target: Path) -> Path:
    """A copy of a tiny pipeline with ten blocks, of which three alone let the image see the text."""
    shutil.copytree(folder, target)
    source = open_model(str(folder))
    layout, config = source.family.layout, source.config("transformer")
    missing = 10 - layout.count(empty_transformer(source))
    cls = getattr(diffusers, source.family.transformer_class)
    model = cls.from_config(dict(config, num_layers=config["num_layers"] + missing))
    randomise(model, seed=3)
    with torch.no_grad():
        for index, block in enumerate(layout.blocks(model)):
            if index not in CARRY:
                cut_text(block, layout)
    shutil.rmtree(target / "transformer")
    model.save_pretrained(target / "transformer")
    return target


def request(model: Path | str, folder: Path, subjects: tuple[str, ...], **changes: Any) -> Request:
    return Request(**{"model": str(model), "images": subjects, "output": folder / "selection.json", **SMALL, **changes})


def test_planted_importance_is_found_by_both_probes(
    request_fixture: Path, tmp_path: Path, subjects: tuple[str, str]
) -> None:
    model = planted(request_fixture, tmp_path / "model")
    training = SMALL["training"] | {"train.learning_rate": 1e-9}  # or LoRA would carry text in every block
    found = select(
        request(model, tmp_path, subjects[:1], ratios=(0.7,), window=1, images_per_prompt=1, training=training)
    )
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


@pytest.fixture(params=["flux", "sana", "sd3", "qwen_image"])
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
    assert set(found["agreement"]["velocity"]) == {"front", "back", "window", "splits of 2", "splits of 4"}
    for name in ("curves.png", "heatmap.png", "contact.png"):
        with Image.open(own.folder / name) as picture:
            assert np.asarray(picture.convert("L")).std() > 5
    text = table_text(found)
    assert "25%" in text and "50%" in text and "rank correlation of velocity with pictures" in text
    assert before == {path: path.read_bytes() for path in flux_folder.rglob("*") if path.is_file()}


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


def test_streamed_and_in_other_batches_the_choice_is_the_same(whole: Any, tmp_path: Path, flux_folder: Path) -> None:
    own, found, _ = whole
    loras = tuple(str(own.folder / "loras" / name) for name in ("red_dog", "cat"))
    again = replace(own, output=tmp_path / "selection.json", loras=loras, images=(), stream=True, batch_size=5)
    result = select(again)
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


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"ratios": (1.0,)}, "--ratios"),
        ({"ratios": (0.01,)}, "is none"),
        ({"ratios": ()}, "--ratios is empty"),
        ({"window": 9}, "--window = 9 does not fit"),
        ({"output": Path("folder")}, "must end in .json"),
        ({"images": ("nowhere",)}, "no folder with pictures"),
        ({"images": ()}, "Give adapters of this model"),
        ({"images": (), "loras": ("nowhere",)}, "--loras"),
        ({"loras": ("a",)}, "give one of the two"),
        ({"count": 0}, "--count must be at least 1"),
        ({"height": 33}, "--height = 33 is no multiple"),
        ({"device": "gpu"}, "--device"),
        ({"dtype": "int8"}, "--dtype"),
        ({"training": {"skip.front": 2}}, "skip.front cannot be set here"),
    ],
)
def test_what_cannot_be_used_is_told_first(
    tmp_path: Path, flux_folder: Path, subjects: tuple[str, str], changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        select(request(flux_folder, tmp_path, subjects, **changes))
    assert not (tmp_path / "selection").exists()
