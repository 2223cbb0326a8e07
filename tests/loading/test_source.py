"""Opening a model: what it is, and one clear sentence when it cannot be used; no weights are read."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockskip.adapters.difference import save_difference
from blockskip.errors import UserError
from blockskip.loading.source import ModelSource, open_model
from blockskip.store.files import write_atomically


def test_a_folder_is_opened_with_its_sizes(flux: ModelSource, sana: ModelSource) -> None:
    assert (flux.family.name, flux.pixel_stride, flux.full_resolution, flux.text_length) == ("flux", 8, 512, 512)
    assert (sana.family.name, sana.pixel_stride, sana.full_resolution, sana.text_length) == ("sana", 8, 1024, 300)


def test_the_settings_of_a_folder_replace_the_family_s(flux_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(flux_folder, tmp_path / "model")
    settings = {"full_resolution": 128, "call": {"max_sequence_length": 32}}
    (folder / "builtin.json").write_text(json.dumps(settings), encoding="utf-8")
    source = open_model(str(folder))
    assert (source.full_resolution, source.text_length) == (128, 32)


def test_parts_are_loaded_frozen_in_eval_mode_and_in_the_dtype(source: ModelSource) -> None:
    encoder = source.family.text_parts[-1][1]
    for part in ("vae", encoder):
        model = source.load(part, torch.bfloat16)
        assert {value.dtype for value in model.parameters()} == {torch.bfloat16}
        assert not model.training
        assert not any(value.requires_grad for value in model.parameters())
    weights = load_file(source.folder / "vae" / "diffusion_pytorch_model.safetensors")
    state = source.load("vae").state_dict()
    assert all(torch.equal(state[name], value) for name, value in weights.items())


def _without_index(folder: Path) -> None:
    (folder / "model_index.json").unlink()


def _damaged_index(folder: Path) -> None:
    (folder / "model_index.json").write_text("{", encoding="utf-8")


def _index_is_a_list(folder: Path) -> None:
    (folder / "model_index.json").write_text("[]", encoding="utf-8")


def _unknown_class(folder: Path) -> None:
    (folder / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}', encoding="utf-8")


def _without_vae(folder: Path) -> None:
    shutil.rmtree(folder / "vae")


def _damaged_settings(folder: Path) -> None:
    (folder / "builtin.json").write_text("{", encoding="utf-8")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_without_index, "model_index.json"),
        (_damaged_index, "damaged"),
        (_index_is_a_list, "damaged"),
        (_unknown_class, "is not supported; supported are FluxPipeline, SanaPipeline"),
        (_without_vae, "lacks vae"),
        (_damaged_settings, "builtin.json"),
    ],
)
def test_a_folder_that_cannot_be_used_is_told_in_a_sentence(
    flux_folder: Path, tmp_path: Path, spoil: Callable[[Path], None], words: str
) -> None:
    folder = shutil.copytree(flux_folder, tmp_path / "model")
    spoil(folder)
    with pytest.raises(UserError) as caught:
        open_model(str(folder))
    assert len(caught.value.problems) == 1
    assert words in caught.value.problems[0]
    assert caught.value.problems[0].startswith(f'model.path = "{folder}"')


def test_a_damaged_config_is_told(flux_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(flux_folder, tmp_path / "model")
    (folder / "vae" / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match="cannot be read"):
        _ = open_model(str(folder)).pixel_stride


@pytest.mark.parametrize("path", ["nowhere", "./nowhere/else", "/nowhere/else", "~/nowhere-at-all"])
def test_what_is_no_folder_and_no_hub_id_is_told(path: str) -> None:
    with pytest.raises(UserError, match="neither"):
        open_model(path)


def test_a_hub_id_without_a_hub_is_told() -> None:
    with pytest.raises(UserError, match=r"cannot be fetched from the hub.*HF_HUB_OFFLINE is set"):
        open_model("nobody/nothing-at-all")


def test_a_single_file_is_told(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    for path in (str(file), "flux1-dev.safetensors"):
        with pytest.raises(UserError, match="single file"):
            open_model(path)


def test_a_part_is_told_with_its_pipeline(flux_folder: Path) -> None:
    for part in ("transformer", "vae", "scheduler"):
        with pytest.raises(UserError) as caught:
            open_model(str(flux_folder / part))
        (sentence,) = caught.value.problems
        assert sentence == (
            f'model.path = "{flux_folder / part}" is one part of a pipeline; '
            f'give the folder of the whole, "{flux_folder}".'
        )


@pytest.mark.parametrize("place", ["", "pytorch_lora_weights.safetensors", "run"])
def test_a_lora_is_told_from_a_model(tmp_path: Path, place: str) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    tensors = {"transformer.blocks.0.attn.to_q.lora_A.weight": torch.zeros(2, 4)}
    save_file(tensors, folder / "pytorch_lora_weights.safetensors")
    given = tmp_path if place == "run" else folder / place
    with pytest.raises(UserError) as caught:
        open_model(str(given))
    (sentence,) = caught.value.problems
    assert f'"{given}" ' in sentence and "a LoRA; give its base as the model" in sentence
    save_file({"blocks.0.attn.to_q.weight": torch.zeros(2, 4)}, folder / "pytorch_lora_weights.safetensors")
    with pytest.raises(UserError) as caught:
        open_model(str(given))
    assert "LoRA" not in caught.value.problems[0]


@pytest.mark.parametrize("place", ["", "weights_difference.safetensors", "run"])
def test_changed_weights_are_told_from_a_model(tmp_path: Path, place: str) -> None:
    folder = tmp_path / "adapter"
    save_difference(folder, {"blocks.0.attn.to_q.weight": torch.ones(2, 4)}, {}, write_atomically)
    given = tmp_path if place == "run" else folder / place
    with pytest.raises(UserError) as caught:
        open_model(str(given))
    (sentence,) = caught.value.problems
    assert sentence == (
        f'model.path = "{given}" {"is" if place.endswith("safetensors") else "holds"} a file of changed weights; '
        "give its base as the model, and it as --lora to `blockskip generate`."
    )
