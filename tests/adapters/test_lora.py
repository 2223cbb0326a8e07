"""Which layers take LoRA, how it begins, and how its state is kept."""

from collections.abc import Sequence

import pytest
import torch
from peft.tuners.lora import LoraLayer
from torch import nn

from blockskip.adapters.lora import adapter_state, add_lora, load_adapter_state, target_names
from blockskip.errors import UserError
from blockskip.loading.source import ModelSource
from blockskip.loading.transformer import empty_transformer
from tests.families.groups import adapt, forward_inputs, group, layers, transformer
from tests.method.bases import first


@pytest.fixture(scope="module")
def empty(flux: ModelSource) -> nn.Module:
    return empty_transformer(flux)


def find(source: ModelSource, model: nn.Module, targets: Sequence[str], middle: Sequence[int] = (1, 2, 3)) -> list[str]:
    return target_names(model, source.family.layout, middle, targets)


def test_a_target_is_a_name_inside_a_block_or_its_end(flux: ModelSource, empty: nn.Module) -> None:
    blocks = ["transformer_blocks.1", "transformer_blocks.2", "single_transformer_blocks.0"]
    expected = [f"{block}.attn.to_q" for block in blocks]
    assert find(flux, empty, ["to_q"]) == find(flux, empty, ["attn.to_q"]) == expected
    assert find(flux, empty, ["to_q", "attn.to_q"]) == expected
    double = [f"{block}.ff.net.2" for block in blocks[:2]]
    assert find(flux, empty, ["ff.net.2"]) == double
    assert not set(find(flux, empty, ["net.2"])) - set(double) - {f"{block}.ff_context.net.2" for block in blocks[:2]}
    assert find(flux, empty, ["proj_mlp"]) == ["single_transformer_blocks.0.proj_mlp"]


def test_the_family_s_own_targets_are_linear_layers_of_the_middle_alone(source: ModelSource) -> None:
    model, layout = empty_transformer(source), source.family.layout
    count = layout.count(model)
    names = layers(source, model, range(2, count - 1))
    assert len(set(names)) == len(names)
    inside = tuple(f"{name}." for name in layout.names(model)[2 : count - 1])
    for name in names:
        assert isinstance(model.get_submodule(name), nn.Linear)
        assert name.startswith(inside)
    for target in source.family.lora_targets:
        assert any(name.endswith("." + target) for name in names), target


@pytest.mark.parametrize(
    ("target", "near"),
    [("ff.0", "ff.net"), ("to_qq", "attn.to_q"), ("attn.to_z", "attn.to_"), ("o_q", "to_q"), ("blk.99", "there are"),
     ("attn.norm_q", "attn."), ("", "there are"), ("proj_mlp2", "proj_mlp")],
)  # fmt: skip
def test_a_target_that_matches_nothing_is_told_with_names_that_are_near(
    flux: ModelSource, empty: nn.Module, target: str, near: str
) -> None:
    with pytest.raises(UserError) as caught:
        find(flux, empty, ["to_k", target])
    assert len(caught.value.problems) == 1
    problem = caught.value.problems[0]
    assert problem.startswith(f'lora.targets: "{target}" matches no linear layer of the 3 trained blocks')
    assert near in problem


def test_every_target_that_matches_nothing_is_told(flux: ModelSource, empty: nn.Module) -> None:
    with pytest.raises(UserError) as caught:
        find(flux, empty, ["one", "to_q", "two"])
    assert len(caught.value.problems) == 2


def test_a_layer_of_a_skipped_block_does_not_count(flux: ModelSource, empty: nn.Module) -> None:
    assert find(flux, empty, ["proj_mlp"], [2, 3])
    with pytest.raises(UserError, match="proj_mlp"):
        find(flux, empty, ["proj_mlp"], [1, 2])


def test_a_family_s_targets_need_one_match_in_all(flux: ModelSource, empty: nn.Module) -> None:
    single = target_names(empty, flux.family.layout, [5], flux.family.lora_targets, each=False)
    assert {name.rpartition("single_transformer_blocks.2.")[2] for name in single} == {
        "attn.to_q", "attn.to_k", "attn.to_v",
    }  # fmt: skip
    with pytest.raises(UserError):
        target_names(empty, flux.family.layout, [5], ["ff.net.2"], each=False)


def test_a_depends_on_the_seed_alone_and_b_is_zero(flux: ModelSource) -> None:
    states = []
    for seed, global_seed in [(1, 0), (1, 99), (2, 0)]:
        model = transformer(flux)
        torch.manual_seed(global_seed)
        before = torch.get_rng_state()
        add_lora(model, layers(flux, model, range(2, 5)), 4, 4.0, 0.0, seed)
        assert torch.equal(torch.get_rng_state(), before)
        states.append(adapter_state(model))
    first, again, other = states
    for name, value in first.items():
        assert torch.equal(value, again[name])
        if ".lora_A." in name:
            assert value.std() > 0
            assert not torch.equal(value, other[name])
        else:
            assert not value.any()
    a = [value for name, value in first.items() if ".lora_A." in name]
    assert len({value.sum().item() for value in a}) == len(a)


def test_a_does_not_depend_on_the_blocks_that_were_left_out(flux: ModelSource) -> None:
    from blockskip.method.split import Split
    from tests.families.groups import stubbed

    whole, partial = transformer(flux), stubbed(flux, Split(2, 3)).model
    names = layers(flux, whole, range(2, 5))
    for model in (whole, partial):
        add_lora(model, names, 4, 4.0, 0.0, 7)
    expected = adapter_state(whole)
    assert expected.keys() == adapter_state(partial).keys()
    assert all(torch.equal(value, expected[name]) for name, value in adapter_state(partial).items())


def test_zero_lora_leaves_the_output_as_it_was(source: ModelSource) -> None:
    model, inputs = transformer(source), forward_inputs(source, group(source))
    with torch.no_grad():
        before = first(model(**inputs))
        adapt(source, model, range(1, 4), zero=True)
        assert torch.equal(first(model(**inputs)), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_lora_is_float32_and_alone_trainable_whatever_the_base(source: ModelSource, dtype: torch.dtype) -> None:
    model = transformer(source, dtype=dtype)
    names = layers(source, model, range(1, 4))
    parameters = add_lora(model, names, 4, 4.0, 0.1, 0)
    assert len(parameters) == 2 * len(names)
    trainable = {name: value for name, value in model.named_parameters() if value.requires_grad}
    assert [id(value) for value in parameters] == [id(trainable[name]) for name in sorted(trainable)]
    assert {value.dtype for value in parameters} == {torch.float32}
    assert {value.dtype for name, value in model.named_parameters() if name not in trainable} == {dtype}
    assert not any(m.cast_input_dtype_enabled for m in model.modules() if isinstance(m, LoraLayer))


def test_a_frozen_a_is_in_the_state_and_gets_no_gradient(source: ModelSource) -> None:
    states, model = [], None
    for freeze in (False, True):
        model = transformer(source)
        names = layers(source, model, range(1, 4))
        parameters = add_lora(model, names, 4, 4.0, 0.0, 0, freeze)
        states.append(adapter_state(model))
    assert model is not None
    assert all(torch.equal(value, states[0][name]) for name, value in states[1].items())
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    assert len(parameters) == len(names) == len(trained)
    assert all(".lora_B." in name for name in trained)
    drawn = {name: torch.randn_like(value) for name, value in states[1].items()}
    load_adapter_state(model, drawn)
    first(model(**forward_inputs(source, group(source)))).square().mean().backward()
    lora = {name: value for name, value in model.named_parameters() if "lora_" in name}
    assert {name for name, value in lora.items() if value.grad is not None} <= set(trained)
    assert sum(value.grad is not None for value in lora.values()) >= len(trained) - 4  # deaf layers
    assert {name for name, value in model.named_parameters() if value.requires_grad} == set(trained)


def test_the_state_is_set_in_place_and_must_be_this_adapter_s(source: ModelSource) -> None:
    model = transformer(source)
    parameters = adapt(source, model, range(1, 3))
    state = {name: torch.randn_like(value) for name, value in adapter_state(model).items()}
    load_adapter_state(model, state)
    assert [id(value) for name, value in sorted(model.named_parameters()) if "lora_" in name] == [
        id(value) for value in parameters.values()
    ]
    assert {value.requires_grad for value in parameters.values()} == {True}
    assert all(torch.equal(value, state[name]) for name, value in adapter_state(model).items())
    for wrong in (dict(list(state.items())[1:]), state | {"other.lora_A.weight": torch.ones(1)}):
        with pytest.raises(ValueError, match="other layers"):
            load_adapter_state(model, wrong)
