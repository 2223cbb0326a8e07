"""Every kernel runs on fake tensors: no value is read, so that a planner can run the very same functions.

The models are made inside the mode; a kernel that asked for a value, or for a real tensor of its own, would raise.
"""

from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from diffusers import FluxTransformer2DModel
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode

from blockskip.adapters.lora import add_lora, target_names
from blockskip.encoding.text import encode_prompts
from blockskip.families import Text, stack_text
from blockskip.families.flux import Flux
from blockskip.loading.autoencoder import PARTS
from blockskip.loading.source import ModelSource
from blockskip.method.skipping import ConstantResidual, SkippedModel, install_stubs, run_block, run_head, span_features
from blockskip.method.split import Split
from blockskip.planner.parts import empty_autoencoder, empty_part, fake
from blockskip.precision import compute
from blockskip.preview.denoise import velocity
from blockskip.training.step import MicroBatch, training_loss
from tests.families.groups import CPU, GUIDANCE, capture_features, group, layers, transformer, unheard
from tests.tiny_families import TINY

DTYPES = [torch.float32, torch.bfloat16]
LENGTH = 32


@pytest.fixture
def mode() -> FakeTensorMode:
    return FakeTensorMode()


def faked(model: Any, mode: FakeTensorMode) -> Any:
    """The model with fake tensors on the CPU in the place of its parameters, buffers and tables."""
    with mode:
        fake(model)
    assert all(isinstance(value, FakeTensor) for value in (*model.parameters(), *model.buffers()))
    return model


def shapes(tensors: Any) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (value.shape, value.dtype) for name, value in tensors.items()}


@pytest.mark.parametrize("name", [*TINY, "sd3_bare"])
def test_encode_text(request: pytest.FixtureRequest, mode: FakeTensorMode, name: str) -> None:
    """Each kernel gives tensors of the shapes and dtypes that real prompts become."""
    source: ModelSource = request.getfixturevalue(name)
    family, prompts = source.family, ["a dog", "a"]
    tokenizers = {part: source.load(part) for part, _ in source.text_parts}
    ids = family.tokenize(tokenizers, prompts, LENGTH)
    expected = stack_text(encode_prompts(source, prompts, LENGTH, torch.float32, CPU))
    for dtype in DTYPES:
        text: Text = {}
        for _, part in source.text_parts:
            encoder = faked(empty_part(source, part, dtype), mode)
            with mode, torch.no_grad(), compute(CPU, dtype):
                given = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in ids.items()}
                text |= family.encode_text({part: encoder}, given)
        with mode:
            text = family.join_text(source.config("transformer"), text, LENGTH)
        assert all(isinstance(value, FakeTensor) for value in text.values())
        assert {name: value.shape for name, value in text.items()} == {
            name: value.shape for name, value in expected.items()
        }
        if dtype == torch.float32:
            assert shapes(text) == shapes(expected)


def test_encode_pixels_and_decode(source: ModelSource, mode: FakeTensorMode) -> None:
    family = source.family
    factor, channels = family.vae_factor(source.config("vae")), family.latent_channels(source.config("vae"))
    for dtype in DTYPES:
        encoder, decoder = (faked(empty_autoencoder(source, half, dtype), mode) for half in PARTS)
        shape = (2, channels, 64 // factor, 96 // factor)
        with mode, torch.no_grad(), compute(CPU, dtype):
            latents = family.encode_pixels(encoder, torch.zeros(2, 3, 64, 96, dtype=dtype), torch.zeros(shape))
            pixels = family.decode(decoder, latents)
        assert isinstance(latents, FakeTensor)
        assert isinstance(pixels, FakeTensor)
        assert latents.shape == shape
        assert pixels.shape == (2, 3, 64, 96)


def test_run_block_and_run_head(source: ModelSource, mode: FakeTensorMode) -> None:
    layout, config = source.family.layout, source.config("transformer")
    for dtype in DTYPES:
        model = faked(empty_part(source, "transformer", dtype), mode)
        blocks = install_stubs(model, layout, range(layout.count(model)))
        state, front, tail = None, None, None
        with mode, torch.no_grad(), compute(CPU, dtype):
            batch = group(source)
            drawn = (batch.latents, batch.noise, batch.sigma, batch.text)
            inputs = source.family.noisy_inputs(config, *drawn, GUIDANCE, dtype)
            for index, block in blocks.items():
                stub = layout.replace(model, index, block)
                state, entered = run_block(model, layout, index, state, inputs)
                layout.replace(model, index, stub)
                front = state if index == 1 else front
                tail = entered if index == len(blocks) - 2 else tail
            assert state is not None
            output, head = run_head(model, layout, state, inputs)
            features = span_features(layout, ConstantResidual(), front, tail, head)
            found = source.family.velocity(output[0], batch.latents)
        assert all(isinstance(value, FakeTensor) for value in (found, *features.values()))
        assert found.shape == batch.latents.shape
        assert features["tail.residual"].shape == head.shape


@pytest.mark.parametrize(
    ("dtype", "checkpointing"), [(torch.float32, False), (torch.bfloat16, True)], ids=["float32", "bfloat16"]
)
def test_training_loss_and_its_gradients(
    source: ModelSource, mode: FakeTensorMode, dtype: torch.dtype, checkpointing: bool
) -> None:
    model, split = empty_part(source, "transformer", dtype), Split(2, 2)
    layout = source.family.layout
    stored = capture_features(source, transformer(source), split, group(source))
    names = layers(source, model, split.middle(layout.count(model)))
    skipped = SkippedModel(model, layout, split, ConstantResidual())
    add_lora(model, names, 4, 4.0, 0.1, 0)
    faked(model, mode)
    if checkpointing:
        source.family.enable_checkpointing(model)
    model.train()
    with mode, compute(CPU, dtype):
        batch = group(source)
        batch.features = {name: torch.zeros(value.shape, dtype=dtype) for name, value in stored.items()}
        loss = training_loss(skipped, source.family, source.config("transformer"), batch, GUIDANCE, dtype)
        loss.backward()
    assert isinstance(loss, FakeTensor)
    assert (loss.shape, loss.dtype) == ((), torch.float32)
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    assert len(trained) == 2 * len(names)
    for name, value in trained.items():
        if unheard(source.family, model, split.middle(layout.count(model)), name):
            continue
        assert value.grad is not None, name
        assert (value.grad.shape, value.grad.dtype) == (value.shape, torch.float32)


@pytest.mark.parametrize("name", [*TINY, "guided"])
def test_a_denoising_step(request: pytest.FixtureRequest, mode: FakeTensorMode, name: str) -> None:
    source: ModelSource = request.getfixturevalue(name)
    for dtype in DTYPES:
        model = faked(empty_part(source, "transformer", dtype), mode)
        with mode, torch.no_grad(), compute(CPU, dtype):
            batch = group(source)
            drawn = (batch.latents.to(dtype), batch.sigma, batch.text)
            found = velocity(model, source.family, source.config("transformer"), *drawn, GUIDANCE)
            found = source.family.guide(found, found, 2.0)
        assert isinstance(found, FakeTensor)
        assert found.shape == batch.latents.shape


def test_a_kernel_that_reads_a_value_would_be_seen(mode: FakeTensorMode) -> None:
    with mode, pytest.raises(DataDependentOutputException):
        bool(torch.zeros(1).sum() > 0)


def test_a_training_step_of_flux_dev_in_its_true_size(mode: FakeTensorMode) -> None:
    """FLUX.1-dev at 512 px, 50% skipped: 12 billion parameters, no memory, seconds."""
    with init_empty_weights(include_buffers=False):
        model: Any = FluxTransformer2DModel(guidance_embeds=True).to(torch.bfloat16).requires_grad_(False)
    total = sum(value.numel() for value in model.parameters())
    assert total == 11_901_408_320
    family, split, tokens, length, width = Flux(), Split(19, 10), 32 * 32, 512, 3072
    layout = family.layout
    names = target_names(model, layout, split.middle(57), family.lora_targets, each=False)
    skipped = SkippedModel(model, layout, split, ConstantResidual())
    kept = sum(value.numel() for value in model.parameters())
    assert 0.3 < kept / total < 0.36
    add_lora(model, names, 16, 16.0, 0.0, 0)
    faked(model, mode)
    with mode, compute(CPU, torch.bfloat16):
        half: dict[str, Any] = {"dtype": torch.bfloat16}
        text = {
            "prompt_embeds": torch.zeros(1, length, 4096, **half),
            "pooled_prompt_embeds": torch.zeros(1, 768, **half),
        }
        features = {
            "front.hidden_states": torch.zeros(1, tokens, width, **half),
            "front.encoder_hidden_states": torch.zeros(1, length, width, **half),
            "tail.residual": torch.zeros(1, tokens, width, **half),
        }
        latents, noise = torch.zeros(1, 16, 64, 64), torch.zeros(1, 16, 64, 64)
        batch = MicroBatch(latents, noise, torch.full((1,), 0.5), torch.ones(1), text, features)
        loss = training_loss(skipped, family, dict(model.config), batch, 1.0, torch.bfloat16)
        loss.backward()
    assert isinstance(loss, FakeTensor)
    trained = [value for value in model.parameters() if value.requires_grad]
    assert len(trained) == 2 * len(names) == 28 * 3 * 2
    assert all(value.grad is not None and value.grad.dtype == torch.float32 for value in trained)
