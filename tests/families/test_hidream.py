"""HiDream-I1's experts with gradients, its pictures that are not square, its CLIPs' ids, its times, and its Llama."""

import inspect
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    HiDreamImagePipeline,
    HiDreamImageTransformer2DModel,
    UniPCMultistepScheduler,
)
from diffusers.models.transformers.transformer_hidream_image import MOEFeedForwardSwiGLU
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from blockskip.adapters.lora import add_lora, target_names
from blockskip.errors import UserError
from blockskip.families.hidream import RoutedExperts
from blockskip.loading.source import ModelSource, open_model
from blockskip.loading.transformer import load_transformer
from blockskip.precision import compute
from tests.families.groups import CPU, distance, forward_inputs, group, transformer
from tests.tiny_families.hidream import LAYERS

DTYPES = [torch.float32, torch.bfloat16]


def own(source: ModelSource, dtype: torch.dtype = torch.float32) -> Any:
    """The model as diffusers loads it, in evaluation mode."""
    return HiDreamImageTransformer2DModel.from_pretrained(source.folder / "transformer", torch_dtype=dtype)


def experts(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, MOEFeedForwardSwiGLU)]


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_in_both_modes_the_output_is_that_of_evaluation(hidream: ModelSource, dtype: torch.dtype) -> None:
    batch, model = group(hidream), transformer(hidream, dtype=dtype)
    assert [type(module) for module in experts(model)] == [RoutedExperts] * 8
    inputs = forward_inputs(hidream, batch, dtype)
    inputs = {
        name: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }
    with torch.no_grad():
        expected = own(hidream, dtype)(**inputs)[0]
        assert torch.equal(model(**inputs)[0], expected)
        assert torch.equal(model.train()(**inputs)[0], expected)
        with compute(CPU, torch.bfloat16):
            expected = own(hidream, dtype)(**inputs)[0]
            assert torch.equal(model(**inputs)[0], expected)
    assert torch.equal(model(**inputs)[0], own(hidream, dtype)(**inputs)[0])  # with gradients on


def gradient(module: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    leaf = tokens.clone().requires_grad_()
    module(leaf).square().sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def test_the_experts_pass_on_the_gradient_that_they_have_in_training(hidream: ModelSource) -> None:
    """Those of diffusers do so in training alone; in evaluation their gradient misses all that went through experts."""
    mine, theirs = experts(transformer(hidream))[0], experts(own(hidream))[0]
    tokens = torch.randn(2, 24, 32)
    expected = gradient(theirs.train(), tokens)
    assert torch.equal(gradient(mine.eval(), tokens), expected)
    assert torch.equal(gradient(mine.train(), tokens), expected)
    assert distance(gradient(theirs.eval(), tokens), expected) > 0.1


def test_an_expert_without_a_token_has_a_gradient_of_zero(hidream: ModelSource) -> None:
    """A picture of one token, and a block of one expert's LoRA beside another's."""
    for quantization in ("none", "nf4"):
        model = load_transformer(hidream, [], torch.float32, CPU, quantization=quantization)  # type: ignore[arg-type]
        layout = hidream.family.layout
        add_lora(model, target_names(model, layout, [0], ["w1", "w2", "w3"]), 2, 2.0, 0.0, 0)
        model(**forward_inputs(hidream, group(hidream, batch=1, grid=(1, 1))))[0].sum().backward()
        found = [value.grad for name, value in model.named_parameters() if ".experts." in name and "lora_B" in name]
        assert len(found) == 12
        assert all(value is not None for value in found)
        assert sorted(bool(value.any()) for value in found if value is not None) == [False] * 6 + [True] * 6


def test_tokens_without_values_are_divided_evenly(hidream: ModelSource) -> None:
    model = experts(transformer(hidream))[0]
    seen: list[int] = []
    for expert in model.experts:
        expert.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[0]))
    model(torch.randn(1, 9, 32))
    assert sum(seen) == 18 and seen != [5, 5, 4, 4]
    seen.clear()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        assert model(torch.empty(1, 9, 32)).shape == (1, 9, 32)
    assert seen == [5, 5, 4, 4]


@pytest.mark.parametrize(
    ("grid", "tokens"), [((4, 4), 16), ((10, 10), 100), ((12, 12), 144), ((8, 12), 100), ((12, 8), 100), ((5, 20), 100)]
)
def test_squares_and_pictures_of_the_pipeline_s_size_are_given_as_the_model_makes_them_of_latents(
    hidream: ModelSource, grid: tuple[int, int], tokens: int
) -> None:
    batch, model = group(hidream, grid=grid), own(hidream)
    inputs = forward_inputs(hidream, batch)
    assert inputs["hidden_states"].shape == (2, tokens, 16)
    sigma = batch.sigma[:, None, None, None]
    by_model = {"hidden_states": (1 - sigma) * batch.latents + sigma * batch.noise, "hidden_states_masks": None}
    with torch.no_grad():
        assert torch.equal(model(**inputs)[0], model(**inputs | by_model)[0])


@pytest.mark.parametrize("grid", [(4, 6), (1, 2), (6, 12), (10, 20)])
def test_other_patches_are_not_filled(hidream: ModelSource, grid: tuple[int, int]) -> None:
    batch, model = group(hidream, grid=grid), own(hidream)
    inputs = forward_inputs(hidream, batch)
    assert inputs["hidden_states"].shape[1] == grid[0] * grid[1]
    assert bool((inputs["hidden_states_masks"] == 1).all())
    if grid == (4, 6):  # what the model would do with these latents is something else
        sigma = batch.sigma[:, None, None, None]
        by_model = {"hidden_states": (1 - sigma) * batch.latents + sigma * batch.noise, "hidden_states_masks": None}
        with torch.no_grad():
            assert distance(model(**inputs | by_model)[0], model(**inputs)[0]) > 0.01


def test_the_clips_have_no_more_ids_than_the_pipeline_gives_them(hidream: ModelSource) -> None:
    tokenizers = {part: hidream.load(part) for part, _ in hidream.text_parts}
    ids = hidream.family.tokenize(tokenizers, ["a dog " * 100], 300)
    assert {name: value.shape[1] for name, value in ids.items()} == hidream.family.token_counts(300)
    assert ids["text_encoder"].shape[1] == ids["text_encoder_2"].shape[1] == 218
    ids = hidream.family.tokenize(tokenizers, ["a dog"], 24)
    end = tokenizers["tokenizer_4"].eos_token_id
    assert set(ids["text_encoder_4"][ids["text_encoder_4_mask"] == 0].tolist()) == {end}


def test_every_block_s_text_is_its_own_layer_of_llama(hidream: ModelSource) -> None:
    """A change of one layer reaches the picture only through the blocks that get it, and the last layer all of them."""
    model, batch = transformer(hidream), group(hidream)
    left: list[torch.Tensor] = []
    for block in hidream.family.layout.blocks(model):
        block.register_forward_hook(lambda _, args, output: left.append(output[0] if type(output) is tuple else output))

    def states() -> list[torch.Tensor]:
        left.clear()
        with torch.no_grad():
            model(**forward_inputs(hidream, batch))
        return [state[:, :24].clone() for state in left]

    plain, embeds = states(), batch.text["llama_embeds"]
    for layer in range(LAYERS):
        changed = embeds.clone()
        changed[:, layer] += 1.0
        batch.text = batch.text | {"llama_embeds": changed}
        first = next(index for index, pair in enumerate(zip(states(), plain, strict=True)) if not torch.equal(*pair))
        assert first == (0 if layer == LAYERS - 1 else layer)


def test_a_scheduler_of_the_other_kind_gets_its_times_as_in_the_pipeline(hidream: ModelSource) -> None:
    options: dict[str, Any] = {"flow_shift": 3.0, "prediction_type": "flow_prediction", "use_flow_sigmas": True}
    scheduler, expected = UniPCMultistepScheduler(**options), UniPCMultistepScheduler(**options)
    hidream.family.set_timesteps(scheduler, 5, 4096, CPU)
    expected.set_timesteps(5, device=CPU)
    assert torch.equal(scheduler.timesteps, expected.timesteps)


def test_every_picture_s_times_are_shifted_as_for_4096_tokens(hidream: ModelSource) -> None:
    """Where the scheduler shifts by their number: by exp(1.15), the most that the pipeline knows."""
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    hidream.family.set_timesteps(scheduler, 4, 64, CPU)
    even = torch.linspace(1, 1 / 1000, 4)
    shift = math.exp(1.15)
    assert torch.allclose(scheduler.sigmas[:-1], shift * even / (1 + (shift - 1) * even), atol=1e-6)


def test_what_the_user_leaves_open_is_as_in_the_pipeline_and_the_training_script(hidream: ModelSource) -> None:
    defaults, call = hidream.family.defaults, inspect.signature(HiDreamImagePipeline.__call__).parameters
    assert defaults.num_inference_steps == call["num_inference_steps"].default == 50
    assert defaults.preview_guidance == call["guidance_scale"].default == 5.0
    assert defaults.text_length == call["max_sequence_length"].default == 128
    assert (defaults.distribution, defaults.shift) == ("uniform", 3.0)
    assert set(hidream.family.lora_targets) == {f"attn1.to_{name}" for name in ("q", "k", "v", "out")}


def test_a_pipeline_without_its_llama_is_refused_with_where_that_is(hidream_folder: Path, tmp_path: Path) -> None:
    """As it is on the hub: Llama has a licence and a place of its own."""
    folder = shutil.copytree(hidream_folder, tmp_path / "model")
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    for part in ("tokenizer_4", "text_encoder_4"):
        del index[part]
    (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(UserError, match=r"lacks text_encoder_4; .*, with .* from meta-llama/Llama-3\.1-8B-Instruct"):
        open_model(str(folder))
