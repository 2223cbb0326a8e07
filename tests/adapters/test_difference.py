"""Files of changed weights: written, told from LoRA, held against a model, and added to it."""

from pathlib import Path

import pytest
import torch

from blockskip.adapters.difference import read_difference, save_difference
from blockskip.adapters.frozen import FrozenAdapters
from blockskip.errors import UserError
from blockskip.loading.source import ModelSource
from blockskip.store.files import write_atomically
from tests.families.groups import transformer

NAME = "transformer_blocks.1.attn.to_q.weight"


@pytest.fixture
def change(flux: ModelSource) -> torch.Tensor:
    """Of the weights of one layer."""
    return torch.randn(transformer(flux).get_parameter(NAME).shape)


def test_what_is_read_is_what_was_written(change: torch.Tensor, tmp_path: Path) -> None:
    path = save_difference(tmp_path, {NAME: change}, {"a": "b"}, write_atomically)
    assert path == tmp_path / "weights_difference.safetensors"
    found = read_difference(path)
    assert found is not None and found.keys() == {NAME}
    assert torch.equal(found[NAME], change)
    change[0, 0] = float("nan")
    with pytest.raises(ValueError, match=f"not finite in transformer.{NAME}"):
        save_difference(tmp_path / "other", {NAME: change}, {}, write_atomically)
    assert not (tmp_path / "other").exists()
    path.write_bytes(b"no safetensors")
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        FrozenAdapters([str(path)], key="lora")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_is_added_to_the_weights(
    flux: ModelSource, change: torch.Tensor, tmp_path: Path, dtype: torch.dtype
) -> None:
    save_difference(tmp_path, {NAME: change}, {}, write_atomically)
    model, before = transformer(flux, dtype=dtype), transformer(flux, dtype=dtype)
    adapters = FrozenAdapters([str(tmp_path)], 0.5, "lora")
    adapters.check(model, "lora")
    adapters.attach(model)
    for name, value in model.named_parameters():
        own = before.get_parameter(name)
        expected = (own.float() + 0.5 * change).to(dtype) if name == NAME else own
        assert value.dtype == dtype
        assert torch.equal(value, expected), name
    assert FrozenAdapters([str(tmp_path)]).identity() != adapters.identity() != ()


def test_weights_of_another_model_are_refused(flux: ModelSource, change: torch.Tensor, tmp_path: Path) -> None:
    model = transformer(flux)
    for name, value, sentence in (
        ("other.weight", change, 'weights for "other.weight", which this model does not have'),
        (NAME, change[1:], "of another model"),
    ):
        save_difference(tmp_path, {name: value}, {}, write_atomically)
        with pytest.raises(UserError, match=sentence):
            FrozenAdapters([str(tmp_path)]).check(model, "lora")
    with pytest.raises(UserError, match="only LoRA files can belong to the base"):
        FrozenAdapters([str(tmp_path)]).check(model)
