"""Frozen adapters act exactly as the pipeline's own LoRA does, on whole models and on single blocks."""

import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import nn

from blockskip.adapters import frozen
from blockskip.adapters.files import DIFFUSERS_KEY, lora_header, save_lora
from blockskip.adapters.frozen import FrozenAdapters
from blockskip.adapters.lora import adapter_state
from blockskip.errors import UserError
from blockskip.loading.source import ModelSource
from blockskip.loading.transformer import StreamedTransformer, empty_transformer, load_transformer
from blockskip.method.split import Split
from blockskip.store.files import write_atomically
from tests.families.groups import CPU, RANK, adapt, distance, forward_inputs, group, layers, transformer
from tests.method.bases import first
from tests.tiny_families import TINY

ALPHA = 6.0


def make_lora(source: ModelSource, folder: Path, middle: range, seed: int = 0) -> Path:
    """A LoRA of random values on some blocks."""
    model = transformer(source)
    adapt(source, model, middle)
    state = adapter_state(model)
    generator = torch.Generator().manual_seed(seed)
    state = {name: 0.3 * torch.randn(value.shape, generator=generator) for name, value in state.items()}
    header = {DIFFUSERS_KEY: lora_header(layers(source, empty_transformer(source), middle), RANK, ALPHA)}
    return save_lora(folder, state, header, write_atomically)


def test_they_act_as_the_pipeline_s_own_lora(source: ModelSource, tmp_path: Path) -> None:
    path = make_lora(source, tmp_path, range(1, 5))
    inputs = forward_inputs(source, group(source))
    pipeline = getattr(diffusers, source.family.pipeline_class).from_pretrained(source.folder)
    TINY[source.family.name].load_lora(pipeline, tmp_path)
    adapters = FrozenAdapters([str(path)])
    adapters.check(empty_transformer(source))
    with_adapters = load_transformer(source, [], torch.float32, CPU, adapters)
    assert with_adapters.state_dict().keys() == transformer(source).state_dict().keys()
    with torch.no_grad():
        expected = first(pipeline.transformer(**inputs))
        assert torch.equal(first(with_adapters(**inputs)), expected)
        assert distance(first(transformer(source)(**inputs)), expected) > 1e-2
        streamed = StreamedTransformer(source, torch.float32, CPU, adapters)
        assert torch.equal(first(next(iter(streamed.run([lambda: inputs])))[1]), expected)


def test_two_of_them_and_the_trained_one_add_up(flux: ModelSource, tmp_path: Path) -> None:
    paths = [str(make_lora(flux, tmp_path / str(seed), range(1, 3), seed)) for seed in (1, 2)]
    inputs = forward_inputs(flux, group(flux))
    pipeline = diffusers.FluxPipeline.from_pretrained(flux.folder)
    for number, path in enumerate(paths):
        pipeline.load_lora_weights(Path(path).parent, adapter_name=f"number{number}")
    pipeline.set_adapters(["number0", "number1"])
    model = load_transformer(flux, [], torch.float32, CPU, FrozenAdapters(paths))
    with torch.no_grad():
        expected = pipeline.transformer(**inputs)[0]
        assert distance(model(**inputs)[0], expected) < 1e-6
    adapt(flux, model, Split(1, 4).middle(8), zero=True)
    with torch.no_grad():
        assert distance(model(**inputs)[0], expected) < 1e-6


@pytest.mark.parametrize(
    "values", [{}, {"lora_alpha": 2}, {"lora_alpha": 9, "alpha_pattern": {"transformer_blocks.1.attn.to_q": 5}},
               {"lora_alpha": 3, "use_rslora": True}], ids=str,
)  # fmt: skip
def test_ranks_and_alphas_that_differ_are_read_as_the_pipeline_reads_them(
    flux: ModelSource, tmp_path: Path, values: dict[str, object]
) -> None:
    ranks = {"transformer_blocks.1.attn.to_q": 2, "single_transformer_blocks.1.attn.to_q": 4, "x_embedder": 4}
    empty, state = empty_transformer(flux), {}
    for name, rank in ranks.items():
        layer = empty.get_submodule(name)
        state[f"{name}.lora_A.weight"] = torch.randn(rank, layer.in_features)
        state[f"{name}.lora_B.weight"] = torch.randn(layer.out_features, rank)
    header = {}
    if values:
        known = {"r": 4, "target_modules": sorted(ranks), "rank_pattern": {"transformer_blocks.1.attn.to_q": 2}}
        header = {DIFFUSERS_KEY: json.dumps({f"transformer.{key}": one for key, one in (known | values).items()})}
    path, inputs = save_lora(tmp_path, state, header, write_atomically), forward_inputs(flux, group(flux))
    pipeline = diffusers.FluxPipeline.from_pretrained(flux.folder)
    pipeline.load_lora_weights(tmp_path)
    model = load_transformer(flux, [], torch.float32, CPU, FrozenAdapters([str(path)]))
    with torch.no_grad():
        assert distance(model(**inputs)[0], pipeline.transformer(**inputs)[0]) < 1e-6


def test_the_scale_is_that_of_the_pipeline(flux: ModelSource, tmp_path: Path) -> None:
    path = make_lora(flux, tmp_path, range(1, 3))
    inputs = forward_inputs(flux, group(flux))
    pipeline = diffusers.FluxPipeline.from_pretrained(flux.folder)
    pipeline.load_lora_weights(tmp_path, adapter_name="one")
    pipeline.set_adapters(["one"], [0.5])
    half = load_transformer(flux, [], torch.float32, CPU, FrozenAdapters([str(path)], 0.5))
    none = load_transformer(flux, [], torch.float32, CPU, FrozenAdapters([str(path)], 0.0))
    with torch.no_grad():
        assert distance(half(**inputs)[0], pipeline.transformer(**inputs)[0]) < 1e-6
        assert torch.equal(none(**inputs)[0], transformer(flux)(**inputs)[0])


def test_they_are_where_the_model_is(flux: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapters, meta = FrozenAdapters([str(make_lora(flux, tmp_path, range(8)))]), torch.device("meta")
    devices: list[torch.device] = []
    product = frozen._product

    def noted(a: torch.Tensor, b: torch.Tensor, factor: float) -> Any:
        devices.extend((a.device, b.device))
        return product(a, b, factor)

    monkeypatch.setattr(frozen, "_product", noted)
    load_transformer(flux, [], torch.float32, meta, adapters)
    with StreamedTransformer(flux, torch.float32, meta, adapters).block(1):
        assert len(devices) > 20
        assert set(devices) == {meta}


def test_they_are_no_part_of_what_is_trained_and_saved(flux: ModelSource, tmp_path: Path) -> None:
    model = load_transformer(flux, [0], torch.float32, CPU, FrozenAdapters([str(make_lora(flux, tmp_path, range(8)))]))
    parameters = adapt(flux, model, range(1, 8))
    assert {name for name, value in model.named_parameters() if value.requires_grad} == set(parameters)
    assert len(adapter_state(model)) == len(parameters)


def test_their_identity_is_that_of_the_bytes_and_the_scale(flux: ModelSource, tmp_path: Path) -> None:
    one, two = (str(make_lora(flux, tmp_path / str(seed), range(1, 3), seed)) for seed in (1, 2))
    identities = [
        FrozenAdapters(paths, scale).identity()
        for paths, scale in [([], 1.0), ([one], 1.0), ([two], 1.0), ([one, two], 1.0), ([one], 0.5)]
    ]
    assert len(set(identities)) == len(identities)
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(Path(one).read_bytes())
    assert FrozenAdapters([str(copy)]).identity() == FrozenAdapters([one]).identity()


def test_a_lora_of_another_model_is_told(flux: ModelSource, sana: ModelSource, tmp_path: Path) -> None:
    adapters = FrozenAdapters([str(make_lora(flux, tmp_path, range(1, 3)))])
    with pytest.raises(UserError, match="is no layer of this model"):
        adapters.check(empty_transformer(sana))
    model = empty_transformer(flux)
    first = next(iter(adapters._pairs))
    parent, _, leaf = first.rpartition(".")
    setattr(model.get_submodule(parent), leaf, nn.Linear(7, 7))
    with pytest.raises(UserError, match="was made for another model"):
        adapters.check(model)
