"""Skipping spans of every family: what must stay bit for bit, what stays to rounding, and what a rule decides."""

from collections.abc import Mapping

import pytest
import torch
from torch import nn

from blockskip.loading.source import ModelSource
from blockskip.method.capture import capture
from blockskip.method.skipping import ConstantResidual, Features, NoResidual, SkippedModel, SkipRule, Stub
from blockskip.method.split import Split
from tests.families.groups import (
    adapt,
    capture_features,
    distance,
    forward_inputs,
    group,
    loss_of,
    stubbed,
    transformer,
    unheard,
)
from tests.method.bases import first
from tests.tiny_families import TINY

# FLUX here has 3 double and 5 single blocks: inside the double stack, at its end, behind it, inside the single one.
FRONTS = [("flux", 1), ("flux", 2), ("flux", 3), ("flux", 4), ("flux", 6)]
FRONTS += [(name, front) for name in TINY if name != "flux" for front in (1, 3, 5)]


@pytest.fixture(scope="module", params=TINY)
def named(request: pytest.FixtureRequest) -> tuple[ModelSource, nn.Module]:
    """Each family's source and its whole transformer; it must not be changed."""
    source: ModelSource = request.getfixturevalue(request.param)
    return source, transformer(source)


def gradients(parameters: Mapping[str, nn.Parameter], loss: torch.Tensor) -> dict[str, torch.Tensor]:
    loss.backward()
    return {name: value.grad for name, value in parameters.items() if value.grad is not None}


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize(("name", "front"), FRONTS)
def test_a_front_alone_changes_no_bit_of_outputs_and_gradients(
    request: pytest.FixtureRequest, name: str, front: int, checkpointing: bool
) -> None:
    source: ModelSource = request.getfixturevalue(name)
    split, batch = Split(front, 0), group(source)
    full = transformer(source)
    middle = split.middle(source.family.layout.count(full))
    batch.features = capture_features(source, full, split, batch)
    whole = SkippedModel(full, source.family.layout, Split(0, 0), ConstantResidual())
    inside = adapt(source, full, middle)
    skipped = stubbed(source, split)
    outside = adapt(source, skipped.model, middle)
    assert inside.keys() == outside.keys()
    for key, value in inside.items():
        assert torch.equal(outside[key], value)
    skipped.model.train()
    if checkpointing:
        source.family.enable_checkpointing(skipped.model)

    reference = loss_of(source, whole, group(source))
    expected = gradients(inside, reference)
    loss = loss_of(source, skipped, batch)
    found = gradients(outside, loss)
    assert torch.equal(loss, reference)
    assert found.keys() == expected.keys() == inside.keys()
    for key, gradient in expected.items():
        assert gradient.any() or unheard(source.family, full, middle, key), key
        assert torch.equal(found[key], gradient), key

    with torch.no_grad():
        inputs = forward_inputs(source, batch)
        output = first(full(**inputs))
        assert torch.equal(first(skipped(batch.features, **inputs)), output)
        batch.text = source.family.without_text_tokens(batch.text)
        assert torch.equal(first(skipped(batch.features, **forward_inputs(source, batch))), output)
        spoilt = {key: value + 0.01 for key, value in batch.features.items()}
        assert not torch.equal(first(skipped(spoilt, **inputs)), output)


def test_text_tokens_are_dropped_only_where_no_block_reads_them(flux: ModelSource, sana: ModelSource) -> None:
    text = group(flux).text
    bare = flux.family.without_text_tokens(text)
    assert not bare["prompt_embeds"].any()
    assert bare["prompt_embeds"].untyped_storage().nbytes() == text["prompt_embeds"].element_size()
    assert bare["prompt_embeds"].shape == text["prompt_embeds"].shape
    assert torch.equal(bare["pooled_prompt_embeds"], text["pooled_prompt_embeds"])
    text = group(sana).text
    assert sana.family.without_text_tokens(text) is text


def test_front_and_tail_give_the_base_s_output(named: tuple[ModelSource, nn.Module]) -> None:
    source, full = named
    batch, layout = group(source), source.family.layout
    count = layout.count(full)
    inputs = forward_inputs(source, batch)
    for front, tail in [(0, 1), (0, 3), (0, count - 1), (1, 1), (1, count - 2), (2, 2), (3, 1), (count - 2, 1)]:
        split = Split(front, tail)
        with torch.no_grad():
            output, features = capture(full, layout, split, ConstantResidual(), inputs)
            skipped = stubbed(source, split)
            adapt(source, skipped.model, split.middle(count), zero=True)
            found = first(skipped(features, **inputs))
            without = features | {"tail.residual": torch.zeros_like(features["tail.residual"])}
            control = first(skipped(without, **inputs))
        assert distance(found, first(output)) <= 1e-6, split
        assert distance(control, first(output)) >= 1e-4, split


def test_only_image_tokens_get_the_residual(flux: ModelSource) -> None:
    batch, split = group(flux), Split(2, 2)
    skipped = stubbed(flux, split)
    features = capture_features(flux, transformer(flux), split, batch)
    tokens = batch.latents.shape[-2] * batch.latents.shape[-1] // 4
    assert features["tail.residual"].shape[1] == tokens
    seen: list[dict[str, torch.Tensor]] = []
    blocks = flux.family.layout.blocks(skipped.model)
    other, last = blocks[-2], blocks[-1]
    assert isinstance(other, Stub) and isinstance(last, Stub)
    other.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(other.incoming(*args, **kwargs)), with_kwargs=True
    )
    last.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(last.incoming(*args, **kwargs)), with_kwargs=True
    )
    with torch.no_grad():
        skipped(features, **forward_inputs(flux, batch))
    before, after = seen
    assert torch.equal(after["encoder_hidden_states"], before["encoder_hidden_states"])
    assert torch.equal(after["hidden_states"], before["hidden_states"] + features["tail.residual"])


def test_no_residual_is_the_model_with_the_blocks_absent(named: tuple[ModelSource, nn.Module]) -> None:
    source, _ = named
    if source.family.name in ("chroma", "hidream"):
        pytest.skip("its forward gives each block something by its place, so that a shorter list is another model")
    layout, batch = source.family.layout, group(source)
    inputs = forward_inputs(source, batch)
    shortened = transformer(source)
    count = layout.count(shortened)
    names = [layout.names(shortened)[index] for index in Split(2, 1).skipped(count)]
    for name in reversed(names):
        blocks, _, position = name.partition(".")
        del getattr(shortened, blocks)[int(position)]
    skipped = stubbed(source, Split(2, 1), NoResidual())
    with torch.no_grad():
        _, features = capture(transformer(source), layout, Split(2, 1), NoResidual(), inputs)
        assert features == {}
        assert torch.equal(first(skipped({}, **inputs)), first(shortened(**inputs)))


class HalfResidual(SkipRule):
    """A rule of a researcher's own."""

    def tail_features(self, span_input: torch.Tensor, span_output: torch.Tensor) -> Features:
        """Two tensors, to see that names are kept apart."""
        return {"before": span_input.clone(), "after": span_output.clone()}

    def tail_output(self, span_input: torch.Tensor, features: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Half of the base's way."""
        return span_input + (features["after"] - features["before"]) / 2


def test_a_rule_decides_what_is_stored_and_what_comes_out(named: tuple[ModelSource, nn.Module]) -> None:
    source, full = named
    batch, split = group(source), Split(1, 2)
    inputs = forward_inputs(source, batch)
    features = capture_features(source, full, split, batch, HalfResidual())
    residual = capture_features(source, full, split, batch)
    assert {name for name in features if name.startswith("tail.")} == {"tail.before", "tail.after"}
    halved = residual | {"tail.residual": residual["tail.residual"] / 2}
    with torch.no_grad():
        own = stubbed(source, split, HalfResidual())(features, **inputs)
        constant = stubbed(source, split)(halved, **inputs)
    assert distance(first(own), first(constant)) <= 1e-6


def test_the_residual_is_kept_in_the_dtype_of_the_block() -> None:
    rule = ConstantResidual()
    before, after = (torch.randn(1, 5, 8).to(torch.bfloat16) for _ in range(2))
    stored = rule.tail_features(before, after)["residual"]
    assert stored.dtype == torch.bfloat16
    assert torch.equal(stored, (after.float() - before.float()).to(torch.bfloat16))
    out = rule.tail_output(before, {"residual": stored})
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, (before.float() + stored.float()).to(torch.bfloat16))


def test_stubs_have_no_parameters_and_keep_names_and_lengths(named: tuple[ModelSource, nn.Module]) -> None:
    source, full = named
    layout, split = source.family.layout, Split(2, 1)
    skipped = stubbed(source, split)
    assert layout.names(skipped.model) == layout.names(full)
    for index, block in enumerate(layout.blocks(skipped.model)):
        assert isinstance(block, Stub) == (index not in split.middle(layout.count(full)))
        assert not isinstance(block, Stub) or not list(block.parameters()) + list(block.buffers())
