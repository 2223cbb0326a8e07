"""The transformer without some of its blocks, or one block at a time: the very weights of the file, and no others."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from blockskip.errors import UserError
from blockskip.loading.source import ModelSource, open_model
from blockskip.loading.transformer import StreamedTransformer, empty_transformer, load_transformer
from blockskip.method.skipping import Stub
from tests.families.groups import CPU, forward_inputs, group, transformer

FILE = "diffusion_pytorch_model.safetensors"


def stored(source: ModelSource) -> dict[str, torch.Tensor]:
    return load_file(source.folder / "transformer" / FILE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_what_is_loaded_is_what_the_file_holds_cast_to_the_dtype(source: ModelSource, dtype: torch.dtype) -> None:
    model, weights = load_transformer(source, [0, 2], dtype, CPU), stored(source)
    names = source.family.layout.names(model)
    expected = {key for key in weights if not key.startswith((f"{names[0]}.", f"{names[2]}."))}
    state = model.state_dict()
    assert state.keys() == expected
    for name, value in state.items():
        assert torch.equal(value, weights[name].to(dtype)), name
    assert not model.training
    assert not any(value.requires_grad for value in model.parameters())


def test_stubs_stand_at_the_indices_and_nowhere_else(source: ModelSource) -> None:
    skip = [1, 2, 5]
    model = load_transformer(source, skip, torch.float32, CPU)
    blocks = source.family.layout.blocks(model)
    assert [index for index, block in enumerate(blocks) if isinstance(block, Stub)] == skip


def test_an_empty_transformer_has_names_and_shapes_but_no_weights(source: ModelSource) -> None:
    empty = empty_transformer(source)
    assert {name: value.shape for name, value in empty.state_dict().items()} == {
        name: value.shape for name, value in stored(source).items()
    }
    assert {value.device.type for value in empty.parameters()} == {"meta"}


def test_nothing_but_what_is_kept_is_asked_of_the_file(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking alone can bring pages of a mapped file into the process."""
    asked: list[str] = []

    class Watched:
        def __init__(self, file: Path) -> None:
            self._file = safe_open(file, framework="pt")

        def __enter__(self) -> "Watched":
            self._tensors = self._file.__enter__()
            return self

        def __exit__(self, *error: object) -> None:
            self._file.__exit__(*error)

        def keys(self) -> list[str]:
            return list(self._tensors.keys())

        def get_tensor(self, name: str) -> torch.Tensor:
            asked.append(name)
            return self._tensors.get_tensor(name)

    monkeypatch.setattr("blockskip.loading.weights._open", Watched)
    names = source.family.layout.names(empty_transformer(source))
    left_out = tuple(f"{names[index]}." for index in (0, 2))
    load_transformer(source, [0, 2], torch.float32, CPU)
    assert sorted(asked) == sorted(name for name in stored(source) if not name.startswith(left_out))
    asked.clear()
    streamed = StreamedTransformer(source, torch.float32, CPU)
    every = tuple(f"{name}." for name in names)
    assert sorted(asked) == sorted(name for name in stored(source) if not name.startswith(every))
    asked.clear()
    with streamed.block(1):
        assert sorted(asked) == sorted(name for name in stored(source) if name.startswith(f"{names[1]}."))


def test_a_file_that_cannot_be_read_or_lacks_a_tensor_is_told(flux: ModelSource, tmp_path: Path) -> None:
    shutil.copytree(flux.folder, tmp_path / "model")
    source, file = open_model(str(tmp_path / "model")), tmp_path / "model" / "transformer" / FILE
    tensors = stored(source)
    save_file({name: value for name, value in tensors.items() if name != "x_embedder.bias"}, file)
    with pytest.raises(UserError, match=r'lacks the tensor "x_embedder\.bias"; fetch the model again'):
        load_transformer(source, [0], torch.float32, CPU)
    file.write_bytes(b"no weights")
    with pytest.raises(UserError, match="cannot be read"):
        load_transformer(source, [0], torch.float32, CPU)


def test_nothing_is_said_about_the_weights_that_are_left_out(
    source: ModelSource, capfd: pytest.CaptureFixture[str]
) -> None:
    load_transformer(source, [0, 2], torch.bfloat16, CPU)
    out, err = capfd.readouterr()
    assert out + err == ""


def test_shards_are_read_like_one_file(source: ModelSource, tmp_path: Path) -> None:
    shutil.copytree(source.folder, tmp_path / "model")
    shutil.rmtree(tmp_path / "model" / "transformer")
    full = transformer(source)
    full.save_pretrained(tmp_path / "model" / "transformer", max_shard_size="80KB")  # type: ignore[operator]
    assert len(list((tmp_path / "model" / "transformer").glob("*.safetensors"))) > 2
    sharded = open_model(str(tmp_path / "model"))
    partial, streamed = load_transformer(sharded, [1], torch.float32, CPU), StreamedTransformer(
        sharded, torch.float32, CPU
    )  # fmt: skip
    name = source.family.layout.names(full)[1]
    expected = full.state_dict()
    assert partial.state_dict().keys() == {key for key in expected if not key.startswith(f"{name}.")}
    assert all(torch.equal(value, expected[key]) for key, value in partial.state_dict().items())
    with streamed.block(1) as block:
        for key, value in block.state_dict().items():
            assert torch.equal(value, expected[f"{name}.{key}"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_block_from_the_file_is_the_whole_model_s_block(source: ModelSource, dtype: torch.dtype) -> None:
    full, streamed = transformer(source, dtype=dtype), StreamedTransformer(source, dtype, CPU)
    layout = source.family.layout
    assert all(isinstance(block, Stub) for block in layout.blocks(streamed.model))
    for index, expected in enumerate(layout.blocks(full)):
        with streamed.block(index) as block:
            assert layout.blocks(streamed.model)[index] is block
            assert not block.training
            assert block.state_dict().keys() == expected.state_dict().keys()
            for name, value in block.state_dict().items():
                assert value.dtype == dtype
                assert torch.equal(value, expected.state_dict()[name])
        assert isinstance(layout.blocks(streamed.model)[index], Stub)


def test_a_block_that_fails_leaves_the_stub_behind(flux: ModelSource) -> None:
    streamed = StreamedTransformer(flux, torch.float32, CPU)
    with pytest.raises(KeyError), streamed.block(3):
        raise KeyError
    assert isinstance(flux.family.layout.blocks(streamed.model)[3], Stub)


def test_a_second_pass_gives_the_same_bytes(flux: ModelSource) -> None:
    streamed, inputs = StreamedTransformer(flux, torch.float32, CPU), forward_inputs(flux, group(flux))
    with torch.no_grad():
        first, second = (next(iter(streamed.run([lambda: inputs])))[1][0] for _ in range(2))
    assert torch.equal(first, second)
