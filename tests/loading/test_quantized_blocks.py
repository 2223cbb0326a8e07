"""Blocks that are quantised while they are read: what of a model, with how much memory; training them is exact."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.profiler import ProfilerActivity, profile

from blockskip.adapters.frozen import FrozenAdapters
from blockskip.loading import quantized
from blockskip.loading.quantized import (
    Quantization,
    QuantizedLinear,
    linear_layers,
    quantize_linear,
)
from blockskip.loading.source import ModelSource, open_model
from blockskip.loading.transformer import empty_transformer, load_transformer
from blockskip.loading.weights import Weights
from blockskip.method.skipping import ConstantResidual, SkippedModel, Stub
from blockskip.method.split import Split
from blockskip.precision import compute
from blockskip.training.step import training_loss
from tests.adapters.test_frozen import make_lora
from tests.families.groups import CPU, GUIDANCE, adapt, capture_features, distance, group, loss_of, transformer
from tests.tiny import make_flux

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = 1e-6


def size(layer: nn.Module) -> int:
    """Bytes of everything a module holds."""
    return sum(value.nbytes for value in (*layer.parameters(), *layer.buffers()))


# -- blocks from a file ------------------------------------------------------------------------------------------------


def of_skipped(source: ModelSource, skip: list[int]) -> tuple[str, ...]:
    """What the names of the skipped blocks' tensors begin with."""
    names = source.family.layout.names(empty_transformer(source))
    return tuple(f"{names[index]}." for index in skip)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_linear_layers_of_the_kept_blocks_are_quantised_and_nothing_else(
    source: ModelSource, quantization: Quantization, dtype: torch.dtype, device: torch.device
) -> None:
    skip = [0, 3]
    model = load_transformer(source, skip, dtype, device, None, quantization)
    file = load_file(source.folder / "transformer" / "diffusion_pytorch_model.safetensors")
    layout = source.family.layout
    kept = tuple(f"{name}." for index, name in enumerate(layout.names(model)) if index not in skip)
    assert [i for i, block in enumerate(layout.blocks(model)) if isinstance(block, Stub)] == skip
    expected = {name for name, layer in empty_transformer(source).named_modules()
                if isinstance(layer, nn.Linear) and name.startswith(kept)}  # fmt: skip
    found = {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantizedLinear)}
    assert found.keys() == expected
    seen = set()
    for name, layer in found.items():
        bias = file.get(f"{name}.bias")
        made = quantize_linear(file[f"{name}.weight"].to(device, dtype), bias, quantization)
        assert layer.state_dict().keys() == made.state_dict().keys()
        for key, value in made.state_dict().items():
            assert torch.equal(layer.state_dict()[key], value), (name, key)
            seen.add(f"{name}.{key}")
    rest = {name: value for name, value in model.state_dict().items() if name not in seen}
    assert rest.keys() | {f"{name}.{leaf}" for name in found for leaf in ("weight", "bias")} >= {
        name for name in file if not name.startswith(of_skipped(source, skip))
    }
    for name, value in rest.items():
        assert torch.equal(value, file[name].to(device, dtype)), name
    assert not model.training
    assert not any(value.requires_grad or value.device.type != device.type for value in model.parameters())


def test_blocks_are_read_one_tensor_at_a_time_and_skipped_ones_not_at_all(
    source: ModelSource, quantization: Quantization, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, alive, blocks = [], [], tuple(f"{name}." for name in source.family.layout.lists)
    original = Weights.read

    def watched(weights: Weights, names: Any) -> dict[str, torch.Tensor]:
        found = original(weights, names)
        if not all(name.startswith(blocks) for name in found):
            return found
        assert len(found) == 1
        weight = [name for name, value in found.items() if value.ndim > 1]
        assert [name for name, reference in alive if reference() is not None and weight] == []
        read.extend(found)
        alive.extend((name, weakref.ref(value)) for name, value in found.items() if value.ndim > 1)
        return found

    monkeypatch.setattr(Weights, "read", watched)
    load_transformer(source, [0, 3], torch.float32, CPU, None, quantization)
    names = Weights(source.folder / "transformer").files
    expected = [name for name in names if name.startswith(blocks) and not name.startswith(of_skipped(source, [0, 3]))]
    assert sorted(read) == sorted(expected)


@pytest.fixture(scope="module")
def wider(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    """A FLUX transformer of 32 MB in float32, in an otherwise tiny pipeline; its largest tensor is 1 MB."""
    from diffusers import FluxTransformer2DModel

    folder = make_flux(tmp_path_factory.mktemp("models") / "wider")
    config = {
        "patch_size": 1, "in_channels": 16, "num_layers": 2, "num_single_layers": 8, "attention_head_dim": 32,
        "num_attention_heads": 8, "joint_attention_dim": 24, "pooled_projection_dim": 20, "guidance_embeds": False,
        "axes_dims_rope": (8, 12, 12),
    }  # fmt: skip
    FluxTransformer2DModel(**config).save_pretrained(folder / "transformer")
    return open_model(str(folder))


def peak_of_loading(source: ModelSource, quantization: Any) -> tuple[int, int]:
    """(largest sum of allocated bytes, the kernels' own included, while loading as bfloat16; bytes of the model then).

    torch also tells of every mapping of the file, with the file's size: no memory is allocated for those.
    """
    mapped = (source.folder / "transformer" / "diffusion_pytorch_model.safetensors").stat().st_size
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        model = load_transformer(source, [0, 9], torch.bfloat16, CPU, None, quantization)
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for _, change in sorted((event.start_ns(), event.nbytes()) for event in events if abs(event.nbytes()) != mapped):
        now += change
        peak = max(peak, now)
    assert now == size(model)
    return peak, size(model)


def test_loading_allocates_the_kept_part_and_nothing_beside_it(wider: ModelSource) -> None:
    """Of the file's float32 each tensor is cast from the mapped pages: no shard and no state dict in memory."""
    peak, kept = peak_of_loading(wider, "none")
    assert peak == kept


def test_loading_needs_little_beside_the_quantised_model(
    wider: ModelSource, quantization: Quantization, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file's float32 is cast and quantised in pieces; what is mapped and not allocated is left aside."""
    _, plain = peak_of_loading(wider, "none")
    monkeypatch.setattr(quantized, "PIECE", 2**14)
    peak, kept = peak_of_loading(wider, quantization)
    assert kept < {"int8": 0.56, "nf4": 0.34}[quantization] * plain
    assert kept <= peak < kept + 2**20 < plain


# -- the whole model ---------------------------------------------------------------------------------------------------


def dequantise(source: ModelSource, model: nn.Module, middle: range, quantization: Quantization) -> nn.Module:
    """Put what quantisation makes of them in the place of the middle's linear weights."""
    blocks = source.family.layout.blocks(model)
    for index in middle:
        for layer in linear_layers(blocks[index]).values():
            layer.weight.data = quantize_linear(layer.weight.data, None, quantization).dequantized(layer.weight.dtype)
    return model


@pytest.mark.parametrize("split", [Split(2, 0), Split(2, 2)], ids=["front", "front and tail"])
def test_training_is_that_of_the_dequantised_model(
    source: ModelSource, quantization: Quantization, split: Split
) -> None:
    """Loss and gradients, the same bits; with no tail skipped, those of the whole model that reads no features."""
    full, layout = transformer(source), source.family.layout
    middle, batch = split.middle(layout.count(full)), group(source)
    features = capture_features(source, full, split, batch)
    models = {
        "quantised": load_transformer(
            source, split.skipped(layout.count(full)), torch.float32, CPU, None, quantization
        ),
        "reference": dequantise(source, transformer(source), middle, quantization),
        "control": full,
    }
    losses, gradients = {}, {}
    for name, model in models.items():
        whole = name != "quantised" and not split.tail
        skipped = SkippedModel(model, layout, Split(0, 0) if whole else split, ConstantResidual())
        lora = adapt(source, model, middle)
        batch.features = {} if whole else features
        loss = loss_of(source, skipped, batch)
        loss.backward()
        losses[name] = loss.detach()
        gradients[name] = torch.cat([value.grad.flatten() for value in lora.values() if value.grad is not None])
    assert distance(losses["control"], losses["reference"]) > 100 * TOLERANCE
    assert distance(gradients["control"], gradients["reference"]) > 100 * TOLERANCE
    assert torch.equal(losses["quantised"], losses["reference"])
    assert torch.equal(gradients["quantised"], gradients["reference"])


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_in_bfloat16_too(source: ModelSource, quantization: Quantization, checkpointing: bool) -> None:
    batch, config = group(source), source.config("transformer")
    layout, count = source.family.layout, source.family.layout.count(empty_transformer(source))
    results = []
    for packed in (True, False):
        model = load_transformer(source, [], torch.bfloat16, CPU, None, quantization if packed else "none")
        model = model if packed else dequantise(source, model, range(count), quantization)
        lora = adapt(source, model, range(count))
        if checkpointing:
            model.train()
            model.enable_gradient_checkpointing()
        with compute(CPU, torch.bfloat16):
            skipped = SkippedModel(model, layout, Split(0, 0), ConstantResidual())
            loss = training_loss(skipped, source.family, config, batch, GUIDANCE, torch.bfloat16)
        loss.backward()
        results.append((loss.detach(), *(value.grad for value in lora.values() if value.grad is not None)))
    assert len(results[0]) > 10
    assert all(torch.equal(found, expected) for found, expected in zip(*results, strict=True))


def test_frozen_adapters_act_on_quantised_layers(
    source: ModelSource, quantization: Quantization, tmp_path: Path
) -> None:
    adapters = FrozenAdapters([str(make_lora(source, tmp_path, range(1, 5)))])
    layout, batch = source.family.layout, group(source)
    count = layout.count(empty_transformer(source))
    reference = dequantise(source, transformer(source), range(count), quantization)
    plain = load_transformer(source, [], torch.float32, CPU, None, quantization)
    models = [load_transformer(source, [], torch.float32, CPU, adapters, quantization), reference, plain]
    adapters.attach(reference)
    found, expected, without = (
        loss_of(source, SkippedModel(model, layout, Split(0, 0), ConstantResidual()), batch).detach()
        for model in models
    )
    assert torch.equal(found, expected)
    assert distance(without, expected) > 1e-3
