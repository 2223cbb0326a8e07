"""Random checkpoints: whole pipelines in the published layout, of every family, written with little memory."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from blockskip.encoding.text import encode_prompts
from blockskip.loading.source import open_model
from blockskip.loading.transformer import load_transformer
from blockskip.loading.weights import Weights
from blockskip.measure import Meter
from blockskip.memory import release, return_freed
from tests.tiny_families import TINY
from tools import make_random_checkpoint as made
from tools.make_random_checkpoint import checkpoint_bytes, main, path_of, write_checkpoint, write_weights

CPU, DTYPE = torch.device("cpu"), torch.bfloat16
MIB = 2**20


@pytest.mark.parametrize("name", TINY)
def test_every_family_reads_what_was_written(name: str, tmp_path: Path) -> None:
    """From a pipeline's configs: all tensors are there, bfloat16 and finite, and its text encoders encode a prompt."""
    tiny = TINY[name].make(tmp_path / "tiny")
    folder = write_checkpoint(str(tiny), tmp_path / "made")
    source, original = open_model(str(folder)), open_model(str(tiny))
    assert source.family is original.family
    for part in ("transformer", "vae"):
        assert Weights(folder / part).files.keys() == Weights(tiny / part).files.keys()
    model, reference = (load_transformer(one, [], DTYPE, CPU) for one in (source, original))
    shapes = {key: value.shape for key, value in reference.state_dict().items()}
    assert {key: value.shape for key, value in model.state_dict().items()} == shapes
    assert all(bool(torch.isfinite(value).all()) for value in model.state_dict().values())
    text = encode_prompts(source, ["a photo of sks dog"], 32, DTYPE, CPU, stream=True)[0]
    expected = encode_prompts(original, ["a photo of sks dog"], 32, DTYPE, CPU)[0]
    assert {key: value.shape[-1] for key, value in text.items() if value.is_floating_point()} \
        == {key: value.shape[-1] for key, value in expected.items() if value.is_floating_point()}  # fmt: skip
    assert all(bool(torch.isfinite(value.float()).all()) for value in text.values())


def test_weights_are_sharded_as_the_libraries_do_it(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)).to("meta", DTYPE)
    write_weights(model, tmp_path, "diffusion_pytorch_model", max_shard_size=10_000)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [
        "diffusion_pytorch_model-00001-of-00002.safetensors", "diffusion_pytorch_model-00002-of-00002.safetensors",
        "diffusion_pytorch_model.safetensors.index.json",
    ]  # fmt: skip
    index = json.loads((tmp_path / names[-1]).read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in model.state_dict().values())
    found: dict[str, torch.Tensor] = {}
    for name in names[:-1]:
        tensors = load_file(tmp_path / name)  # by the library: the header and the offsets are right
        assert all(index["weight_map"][key] == name for key in tensors)
        assert sum(value.nbytes for value in tensors.values()) <= 10_000
        found |= tensors
    assert {key: (value.shape, value.dtype) for key, value in found.items()} \
        == {key: (value.shape, value.dtype) for key, value in model.state_dict().items()}  # fmt: skip
    weights = torch.stack([found["0.weight"], found["2.weight"]]).float()
    assert weights.std().item() == pytest.approx(made.DEVIATION, rel=0.05)
    assert abs(weights.mean().item()) < 4 * made.DEVIATION / math.sqrt(weights.numel())
    assert not torch.equal(weights[0], weights[1])
    assert torch.equal(found["1.weight"], torch.ones(64, dtype=DTYPE)), "of a norm"


def test_drawn_values_go_on_where_they_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made, "DRAWN", 7)
    write_weights(nn.Linear(5, 4, bias=False).to("meta", DTYPE), tmp_path, "model")
    values = load_file(tmp_path / "model.safetensors")["weight"].flatten()
    assert values.unique().numel() == 7
    assert torch.equal(values[:13], values[7:])


def test_buffers_keep_their_values_and_tied_weights_are_written_once(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)).to("meta", DTYPE)
    model[1].weight = model[0].weight
    model.register_buffer("table", torch.arange(6.0).reshape(2, 3))
    model.register_buffer("count", torch.tensor(3))
    write_weights(model, tmp_path, "model")
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == {"0.weight", "table", "count"}
    assert torch.equal(found["table"], model.table)
    assert torch.equal(found["count"], model.count)


def test_a_large_model_is_written_with_little_memory(tmp_path: Path) -> None:
    model = nn.Linear(8192, 16384, bias=False).to("meta", DTYPE)  # 256 MiB
    return_freed()
    release()
    meter = Meter(CPU)
    with meter.phase("write"):
        write_weights(model, tmp_path, "model")
    assert (tmp_path / "model.safetensors").stat().st_size > 256 * MIB
    assert meter.records()[0].host_private_peak < 64 * MIB


def test_names_are_those_of_the_presets_and_of_the_hub() -> None:
    sana = "Efficient-Large-Model/Sana_1600M_1024px_diffusers"
    assert path_of("sana-1.6b") == path_of("sana") == path_of(sana) == sana
    assert path_of("sana-0.6b") == "Efficient-Large-Model/Sana_600M_1024px_diffusers"
    assert path_of("flux") == "black-forest-labs/FLUX.1-dev"
    assert 23e9 < checkpoint_bytes("flux") < 25e9
    assert checkpoint_bytes("sana-0.6b") < checkpoint_bytes("sana-1.6b") < 5e9


def test_what_cannot_be_written_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["--model", "no-such-model", "--out", str(tmp_path / "out")]) == 2
    assert '"no-such-model" is neither' in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["--model", "builtin-sana", "--out", str(tmp_path)]) == 2
    assert "is not empty; give a new folder" in capsys.readouterr().err
    assert main(["--model", "builtin-sana", "--out", str(tmp_path / "out"), "--max-shard-size", "abc"]) == 2
    assert 'max_shard_size "abc" is not a size; give "5GB", for example.' in capsys.readouterr().err
    small, published = (checkpoint_bytes("sana-0.6b", encoders) for encoders in ("small", "published"))
    assert published > small + 5e9, "Gemma-2 has 2.6 billion weights"
    monkeypatch.setattr(made, "checkpoint_bytes", lambda name, encoders: 2**60)
    assert main(["--model", "builtin-sana", "--out", str(tmp_path / "out")]) == 2
    assert "builtin-sana takes 1073741824 GiB and the disk of" in capsys.readouterr().err
    assert not (tmp_path / "out" / "model_index.json").exists()
