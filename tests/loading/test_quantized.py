"""Quantised layers: how far they are from the weights, how they compute, what they keep; also as fake tensors."""

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from blockskip.adapters.lora import add_lora, target_names
from blockskip.loading import quantized
from blockskip.loading.quantized import (
    BLOCK,
    Quantization,
    QuantizedLinear,
    empty_quantized,
    linear_layers,
    quantize_linear,
)
from blockskip.loading.source import ModelSource
from blockskip.loading.transformer import empty_transformer, load_transformer
from blockskip.method.layout import TEXT
from blockskip.method.skipping import ConstantResidual, SkippedModel
from blockskip.method.split import Split
from blockskip.planner.parts import empty_part
from blockskip.precision import compute
from blockskip.training.step import training_loss
from tests.families.groups import CPU, GUIDANCE, distance, group, layers
from tests.families.test_kernels import faked

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(96, 200), (33, 10), (64, 64), (8, 6), (1, 2)]


def size(layer: nn.Module) -> int:
    """Bytes of everything a layer holds."""
    return sum(value.nbytes for value in (*layer.parameters(), *layer.buffers()))


# -- one layer ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gaussian_weight_comes_back_within_the_known_error(
    quantization: Quantization, dtype: torch.dtype, device: torch.device
) -> None:
    weight = (0.02 * torch.randn(512, 768)).to(device, dtype)
    weight[7] = 0
    found = quantize_linear(weight, None, quantization).dequantized(dtype)
    assert (found.dtype, found.shape, found.device.type) == (dtype, weight.shape, device.type)
    low, high = {"int8": (0.005, 0.01), "nf4": (0.08, 0.1)}[quantization]  # not better than so few bits allow
    assert low < distance(found.float(), weight.float()) < high
    assert not found[7].any()
    blocks = found.reshape(-1, BLOCK[quantization]).abs().amax(1)
    assert torch.allclose(blocks, weight.reshape(-1, BLOCK[quantization]).abs().amax(1), rtol=1e-2)


@pytest.mark.parametrize("shape", [(512, 768), *SHAPES])
def test_a_weight_takes_the_bytes_that_are_stated(quantization: Quantization, shape: tuple[int, int]) -> None:
    bias = torch.randn(shape[0])
    layer = quantize_linear(torch.randn(shape), bias, quantization, torch.bfloat16)
    count = shape[0] * shape[1]
    scales = 4 * -(-count // {"int8": 256, "nf4": 64}[quantization])
    assert size(layer) == (count + 1024 if quantization == "int8" else (count + 1) // 2) + scales + 2 * shape[0]
    if count == 512 * 768:
        share = (layer.weight.nbytes + layer.absmax.nbytes) / count
        assert share == {"int8": 1.015625, "nf4": 0.5625}[quantization]


@pytest.mark.parametrize("shape", SHAPES)
def test_an_empty_layer_has_the_tensors_of_a_filled_one(quantization: Quantization, shape: tuple[int, int]) -> None:
    linear = nn.Linear(shape[1], shape[0], device="meta")
    filled = quantize_linear(torch.randn(shape), torch.zeros(shape[0]), quantization, torch.bfloat16)
    empty = empty_quantized(linear, quantization, torch.bfloat16, CPU)

    def tensors(layer: nn.Module) -> dict[str, Any]:
        return {name: (value.shape, value.dtype, value.device) for name, value in layer.state_dict().items()}

    assert tensors(empty) == tensors(filled)
    assert {value.device.type for value in empty_quantized(linear, quantization, torch.float32).buffers()} == {"meta"}
    assert empty_quantized(nn.Linear(4, 2, bias=False), quantization, torch.float32).bias is None


def test_piece_by_piece_is_as_at_once(quantization: Quantization, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(90, 100)
    whole = quantize_linear(weight, None, quantization).state_dict()
    monkeypatch.setattr(quantized, "PIECE", 512)
    for name, value in quantize_linear(weight, None, quantization).state_dict().items():
        assert torch.equal(value, whole[name]), name


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES[:4])
def test_a_product_is_that_with_the_dequantised_weight(
    quantization: Quantization,
    device: torch.device,
    dtype: torch.dtype,
    bias: bool,
    shape: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit, forward and backward, in float32 and under autocast; the weight is never wider than the product."""
    offset = torch.randn(shape[0], device=device, dtype=dtype) if bias else None
    layer = quantize_linear(torch.randn(shape, device=device), offset, quantization, dtype)
    plain = nn.Linear(shape[1], shape[0], bias=bias, device=device, dtype=dtype).requires_grad_(False)
    plain.weight.copy_(layer.dequantized(dtype))
    if offset is not None:
        plain.bias.copy_(offset)
    asked: list[torch.dtype] = []
    original = QuantizedLinear.dequantized
    monkeypatch.setattr(QuantizedLinear, "dequantized", lambda own, kind: asked.append(kind) or original(own, kind))
    drawn, pull = torch.randn(2, 5, shape[1], device=device), torch.randn(2, 5, shape[0], device=device)
    results = []
    for module in (layer, plain):
        given = drawn.clone().requires_grad_(True)
        with compute(device, dtype):
            output = module(given)
        (output.float() * pull).sum().backward()
        assert given.grad is not None
        results.append((output.detach(), given.grad))
    assert asked == [dtype, dtype]
    assert results[0][0].dtype == results[1][0].dtype == dtype
    assert results[0][1].dtype == results[1][1].dtype == torch.float32
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)


def test_a_dequantised_weight_lives_for_one_product_only(
    quantization: Quantization, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    original = QuantizedLinear.dequantized

    def watched(layer: QuantizedLinear, dtype: torch.dtype) -> torch.Tensor:
        assert [reference for reference in made if reference() is not None] == []
        weight = original(layer, dtype)
        made.append(weakref.ref(weight.untyped_storage()))
        return weight

    monkeypatch.setattr(QuantizedLinear, "dequantized", watched)
    stack = nn.Sequential(*(quantize_linear(torch.randn(32, 32), None, quantization) for _ in range(3)))
    output = stack(torch.randn(4, 32, requires_grad=True))
    assert len(made) == 3
    assert [reference for reference in made if reference() is not None] == []
    output.sum().backward()
    assert len(made) == 6
    assert [reference for reference in made if reference() is not None] == []


def test_lora_on_top_is_float32_and_finds_the_layer(quantization: Quantization, flux: ModelSource) -> None:
    model = load_transformer(flux, [0], torch.bfloat16, CPU, None, quantization)
    middle = range(1, 8)
    names = target_names(model, flux.family.layout, middle, flux.family.lora_targets, each=False)
    assert names == layers(flux, empty_transformer(flux), middle)
    parameters = add_lora(model, names, 2, 2.0, 0.0, 0)
    assert len(parameters) == 2 * len(names)
    assert {value.dtype for value in parameters} == {torch.float32}
    assert {id(value) for value in model.parameters() if value.requires_grad} == {id(value) for value in parameters}
    assert all(isinstance(model.get_submodule(f"{name}.base_layer"), QuantizedLinear) for name in names)


# -- fake tensors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_empty_layer_of_fake_tensors_computes(quantization: Quantization, dtype: torch.dtype) -> None:
    """Memory is counted by what the kernels return: the weight in the compute dtype, once forward and once backward."""
    with FakeTensorMode(), compute(CPU, dtype):
        layer = empty_quantized(nn.Linear(3072, 12288), quantization, dtype)
        given = torch.empty(1, 7, 3072, requires_grad=True)
        output, weight = layer(given), layer.dequantized(dtype)
        output.sum().backward()
    assert all(isinstance(value, FakeTensor) for value in (*layer.parameters(), *layer.buffers(), output, given.grad))
    assert (weight.shape, weight.dtype) == ((12288, 3072), dtype)
    assert (output.shape, output.dtype) == ((1, 7, 12288), dtype)
    assert given.grad is not None
    assert (given.grad.shape, given.grad.dtype) == (given.shape, torch.float32)
    assert layer.weight.nbytes + layer.absmax.nbytes == 3072 * 12288 * {"int8": 1.015625, "nf4": 0.5625}[quantization]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_a_training_step_runs_on_fake_tensors(
    source: ModelSource, quantization: Quantization, dtype: torch.dtype, checkpointing: bool
) -> None:
    model, split, mode, width = empty_part(source, "transformer", dtype), Split(2, 2), FakeTensorMode(), 32
    layout = source.family.layout
    middle = split.middle(layout.count(model))
    names = layers(source, model, middle)
    skipped = SkippedModel(model, layout, split, ConstantResidual())
    for index in middle:
        block = layout.blocks(model)[index]
        for name, linear in linear_layers(block).items():
            block.set_submodule(name, empty_quantized(linear, quantization, dtype))
    add_lora(model, names, 4, 4.0, 0.1, 0)
    faked(model, mode)
    if checkpointing:
        model.enable_gradient_checkpointing()
    model.train()
    with mode, compute(CPU, dtype):
        batch = group(source)
        batch.features = {
            name: torch.zeros(2, 24, width, dtype=dtype) for name in ("tail.residual", "front.hidden_states")
        }
        if TEXT in layout.returns_of(layout.names(model)[1]):
            batch.features |= {"front.encoder_hidden_states": torch.zeros(2, 6, width, dtype=dtype)}
        loss = training_loss(skipped, source.family, source.config("transformer"), batch, GUIDANCE, dtype)
        loss.backward()
    gradients = [value.grad for value in model.parameters() if value.requires_grad]
    assert len(gradients) == 2 * len(names)
    assert all(isinstance(value, FakeTensor) for value in (loss, *gradients))
