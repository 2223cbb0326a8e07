"""Which weights files a part has, what is read from them, and what they are called in the keys of stores."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import FluxTransformer2DModel
from safetensors.torch import load_file, save_file

from blockskip.errors import UserError
from blockskip.loading import weights as module
from blockskip.loading.weights import Weights, file_identity

NAME = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def part(flux_folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(flux_folder / "transformer", tmp_path / "transformer")


def test_tensors_are_read_by_name(part: Path) -> None:
    weights, expected = Weights(part), load_file(part / NAME)
    names = weights.under("transformer_blocks.1")
    assert set(names) == {name for name in expected if name.startswith("transformer_blocks.1.")}
    assert not any(name.startswith("single_") for name in names)
    found = weights.read(names)
    assert found.keys() == set(names)
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_the_identity_is_that_of_the_bytes(part: Path, tmp_path: Path) -> None:
    same = shutil.copytree(part, tmp_path / "elsewhere")
    first = Weights(part).identity()
    assert Weights(same).identity() == first
    tensors = load_file(part / NAME)
    tensors["x_embedder.bias"][3] += 1e-3
    save_file(tensors, same / NAME)
    os.utime(same / NAME, ns=(1, 1))
    assert Weights(same).identity() != first


def test_a_hash_is_remembered_by_path_size_and_time(part: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = file_identity(part / NAME)
    monkeypatch.setattr(module, "file_sha256", lambda _: pytest.fail("hashed again"))
    assert file_identity(part / NAME) == first
    monkeypatch.setattr(module, "file_sha256", lambda _: "new")
    os.utime(part / NAME, ns=(5, 5))
    assert file_identity(part / NAME) == "new"


@pytest.mark.parametrize("content", [b"", b"[]", b"not json", b"\xff\xfe"])
def test_a_damaged_memory_of_hashes_costs_nothing_but_time(part: Path, content: bytes) -> None:
    first = file_identity(part / NAME)
    memory = module._memory_file()
    memory.write_bytes(content)
    assert file_identity(part / NAME) == first


def test_the_hub_s_own_hash_is_taken(tmp_path: Path) -> None:
    blob = tmp_path / ("ab" * 32)
    blob.write_bytes(b"anything")
    (tmp_path / "model.safetensors").symlink_to(blob)
    assert file_identity(tmp_path / "model.safetensors") == "ab" * 32


def test_beside_a_variant_the_plain_file_is_taken_as_from_pretrained_takes_it(part: Path) -> None:
    expected = load_file(part / NAME)
    save_file(
        {name: torch.zeros_like(value) for name, value in expected.items()}, part / NAME.replace(".", ".fp16.", 1)
    )
    found = Weights(part).read(["x_embedder.weight"])["x_embedder.weight"]
    assert torch.equal(found, FluxTransformer2DModel.from_pretrained(part).x_embedder.weight)
    assert torch.equal(found, expected["x_embedder.weight"])


def test_a_folder_without_weights_or_with_damaged_ones_is_told(part: Path, tmp_path: Path) -> None:
    (part / NAME).write_bytes((part / NAME).read_bytes()[:40])
    with pytest.raises(UserError, match="fetch it again"):
        Weights(part)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no safetensors weights"):
        Weights(tmp_path / "empty")
