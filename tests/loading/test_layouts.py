"""Which layouts of a single file each family takes, and that the README says so."""

import re
import shutil
from pathlib import Path

import diffusers
import pytest
import torch
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from safetensors.torch import save_file

from blockskip.errors import UserError
from blockskip.families import FAMILIES
from blockskip.loading.source import open_model
from tests.originals import ORIGINALS, write_original
from tests.originals import transformer_state as state
from tests.tiny import randomise
from tests.tiny_families import ALIKE, TINY

#: Transformers of which diffusers reads its own names alone; of the others the original layout is tested beside this.
OWN_NAMES = sorted(TINY.keys() - ALIKE - ORIGINALS.keys())


def misfit(folder: Path, tensors: dict[str, torch.Tensor], file: Path) -> str:
    """What is said of a file."""
    save_file(tensors, file)
    with pytest.raises(UserError) as caught:
        open_model(str(folder), transformer=str(file))
    (sentence,) = caught.value.problems
    return sentence


def test_the_original_layout_is_read_of_every_family_that_diffusers_converts() -> None:
    classes = {family.name: family.transformer_class for family in FAMILIES if family.name not in ALIKE}
    assert {name for name, cls in classes.items() if cls in SINGLE_FILE_LOADABLE_CLASSES} == ORIGINALS.keys()


def test_the_readme_names_those_that_need_diffusers_names() -> None:
    text = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
    (sentence,) = re.findall(r"([^.]*(?:1\.5[^.]*)?) need diffusers' names", " ".join(text.split()))
    named = {name.strip().lower().replace("-", "_") for name in re.split(r", | and ", sentence)}
    assert named == {name.removesuffix("_sigma") for name in OWN_NAMES} | {"sana_1.5"}


@pytest.mark.parametrize("name", [name for name in TINY if name not in ALIKE])
def test_diffusers_names_are_read_of_every_family(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """As they are; a tensor less, or whole blocks, is told as such, under a prefix that text encoders have too."""
    folder: Path = request.getfixturevalue(f"{name}_folder")
    tensors, file = state(folder), tmp_path / "file.safetensors"
    save_file(tensors, file)
    source = open_model(str(folder), transformer=str(file))
    assert source.single is not None and source.single.as_it_is
    assert all(torch.equal(source.single.tensors[key].read(), value) for key, value in tensors.items())
    *most, last = source.single.tensors  # in the order of the model
    found = misfit(folder, {f"model.{key}": tensors[key] for key in most}, file)
    assert f": it lacks {last}" in found
    few = most[: len(tensors) // 3]
    found = misfit(folder, {f"model.{key}": tensors[key] for key in few}, file)
    assert f": it lacks {most[len(few)]} and {len(tensors) - len(few) - 1} more" in found


@pytest.mark.parametrize("name", OWN_NAMES)
def test_other_names_without_a_converter_are_told(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    folder = request.getfixturevalue(f"{name}_folder")
    found = misfit(folder, {"blocks.0.attn.qkv.weight": torch.zeros(4, 4)}, tmp_path / "file.safetensors")
    assert ": its tensors have other names than in diffusers, which cannot convert that class; give a file of" in found
    assert "the same one with diffusers' names" in found


def test_the_original_layout_of_sana_1_5_is_told(sana_folder: Path, tmp_path: Path) -> None:
    """Its attention has norms that diffusers' converter does not know."""
    folder = shutil.copytree(sana_folder, tmp_path / "model")
    model = diffusers.SanaTransformer2DModel.from_config(
        open_model(str(folder)).config("transformer") | {"qk_norm": "rms_norm_across_heads"}
    )
    randomise(model, seed=1)
    model.save_pretrained(folder / "transformer")
    tensors = ORIGINALS["sana"].state(state(folder))
    for key in [key for key in tensors if ".norm_" in key]:
        there = key.replace("transformer_blocks.", "blocks.").replace("attn1", "attn").replace("attn2", "cross_attn")
        tensors[re.sub(r"norm_([qk])", r"\1_norm", there)] = tensors.pop(key)
    assert "blocks.0.attn.q_norm.weight" in tensors
    found = misfit(folder, tensors, tmp_path / "file.safetensors")
    assert "transformer is a SanaTransformer2DModel: diffusers has no place for blocks.0." in found
    assert "the same one with diffusers' names" in found


def test_a_file_with_more_than_the_pipeline_is_told(guided_folder: Path, tmp_path: Path) -> None:
    """FLUX.1-dev's file with schnell's folder."""
    folder = shutil.copytree(guided_folder, tmp_path / "schnell")
    config = folder / "transformer" / "config.json"
    config.write_text(config.read_text(encoding="utf-8").replace('"guidance_embeds": true', '"guidance_embeds": false'))
    file = write_original("flux", guided_folder, tmp_path / "file.safetensors")
    with pytest.raises(UserError, match=r"has no time_text_embed\.guidance_embedder.* and 3 more .*as --model the"):
        open_model(str(folder), transformer=str(file))
