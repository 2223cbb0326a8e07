"""The generic method on eight architectures given by their layout alone: nothing in it knows the package's families."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from blockskip.adapters.lora import add_lora, target_names
from blockskip.method.capture import capture
from blockskip.method.layout import State
from blockskip.method.skipping import (
    ConstantResidual,
    NoResidual,
    SkippedModel,
    SkipRule,
    Stub,
    install_stubs,
    run_block,
    run_head,
    span_features,
)
from blockskip.method.split import Split
from tests.method.bases import BASES, Base, first

RULE = ConstantResidual()


@pytest.fixture(scope="module", params=BASES, ids=lambda make: make.__name__)
def base(request: pytest.FixtureRequest) -> Base:
    torch.manual_seed(0)
    make: Callable[[], Base] = request.param
    return make()


class Absent(NoResidual):
    """The tail is absent, the front is stored."""

    uses_front = True


@contextmanager
def skipping(base: Base, split: Split, rule: SkipRule = RULE) -> Iterator[SkippedModel]:
    """The model with the split's blocks taken out, and put back at the end."""
    removed = install_stubs(base.model, base.layout, split.skipped(base.layout.count(base.model)))
    assert set(removed) == set(split.skipped(base.layout.count(base.model)))
    try:
        yield SkippedModel(base.model, base.layout, split, rule)
    finally:
        for index, block in removed.items():
            assert isinstance(base.layout.replace(base.model, index, block), Stub)


def test_a_front_alone_changes_no_bit(base: Base) -> None:
    with torch.no_grad():
        full = base.output()
        for front in range(1, base.layout.count(base.model)):
            output, features = capture(base.model, base.layout, Split(front, 0), RULE, base.inputs)
            assert torch.equal(first(output), full)
            with skipping(base, Split(front, 0)) as skipped:
                assert torch.equal(first(skipped(features, **base.inputs)), full), front
                zeros = {name: torch.zeros_like(value) for name, value in features.items()}
                assert not torch.equal(first(skipped(zeros, **base.inputs)), full), front


@pytest.mark.parametrize("split", [(0, 1), (0, 3), (0, 5), (1, 1), (1, 4), (2, 2), (4, 1)], ids=str)
def test_front_and_tail_give_the_base_s_output(base: Base, split: tuple[int, int]) -> None:
    cut = Split(*split)
    with torch.no_grad():
        full = base.output()
        _, features = capture(base.model, base.layout, cut, RULE, base.inputs)
        with skipping(base, cut) as skipped:
            output = first(skipped(features, **base.inputs))
            without = features | {"tail.residual": torch.zeros_like(features["tail.residual"])}
            control = first(skipped(without, **base.inputs))
    assert (output - full).norm() <= 1e-6 * full.norm()
    assert (control - full).norm() >= 1e-4 * full.norm()


@pytest.mark.parametrize("split", [(0, 2), (2, 1), (1, 5)], ids=str)
def test_the_residual_is_that_of_the_image_tokens_also_when_the_middle_has_changed(
    base: Base, split: tuple[int, int]
) -> None:
    """With the tail merely absent the model itself cuts the image tokens out of its stream: what Eq. 3 is held to."""
    cut = Split(split[0], min(split[1], base.layout.count(base.model) - split[0] - 1))
    head_inputs: list[torch.Tensor] = []
    hook = base.layout.head_of(base.model).register_forward_pre_hook(
        lambda _, args, kwargs: head_inputs.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    with torch.no_grad():
        _, features = capture(base.model, base.layout, cut, RULE, base.inputs)
        front = {name: value for name, value in features.items() if name.startswith("front.")}
        with skipping(base, cut, Absent()) as skipped:
            skipped(front, **base.inputs)
        block = base.layout.blocks(base.model)[cut.front]
        before = {name: value.clone() for name, value in block.state_dict().items()}
        for value in block.parameters():
            value.mul_(1.1)
        for rule, given in ((Absent(), front), (RULE, features)):
            with skipping(base, cut, rule) as skipped:
                skipped(given, **base.inputs)
        block.load_state_dict(before)
    hook.remove()
    full, absent, changed, found = head_inputs
    assert features["tail.residual"].shape == full.shape
    assert torch.allclose(features["tail.residual"], full - absent, atol=1e-5)
    assert (changed - absent).norm() > 1e-3 * absent.norm()
    assert torch.allclose(found, changed + (full - absent), atol=1e-5)


def test_block_by_block_gives_what_one_forward_pass_gives(base: Base) -> None:
    count = base.layout.count(base.model)
    cut = Split(2, 4 if count > 6 else 2)
    with torch.no_grad():
        full, expected = capture(base.model, base.layout, cut, RULE, base.inputs)
        blocks = install_stubs(base.model, base.layout, range(count))
        state: State | None = None
        front: State | None = None
        tail: torch.Tensor | None = None
        for index, block in blocks.items():
            stub = base.layout.replace(base.model, index, block)
            state, entered = run_block(base.model, base.layout, index, state, base.inputs)
            base.layout.replace(base.model, index, stub)
            front = state if index == cut.front - 1 else front
            tail = entered if index == count - cut.tail else tail
        assert state is not None
        output, head = run_head(base.model, base.layout, state, base.inputs)
        for index, block in blocks.items():
            base.layout.replace(base.model, index, block)
    assert torch.equal(first(output), first(full))
    found = span_features(base.layout, RULE, front, tail, head)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_gradients_behind_a_front_are_those_of_the_whole_model(base: Base) -> None:
    count = base.layout.count(base.model)
    cut = Split(count // 2, 0)
    full = copy.deepcopy(base.model)
    names = target_names(full, base.layout, cut.middle(count), base.targets, each=False)
    with torch.no_grad():
        _, features = capture(base.model, base.layout, cut, RULE, base.inputs)
    skipped = SkippedModel(copy.deepcopy(base.model), base.layout, cut, RULE)
    target = torch.randn_like(base.output())

    def gradients(model: Any, call: Callable[[], Any]) -> dict[str, torch.Tensor]:
        add_lora(model, names, 2, 4.0, 0.0, seed=1)
        found = {name: value for name, value in sorted(model.named_parameters()) if value.requires_grad}
        torch.manual_seed(5)
        for name, value in found.items():
            if ".lora_B." in name:
                value.data.normal_(0, 0.1)
        (first(call()) - target).square().mean().backward()
        return {name: value.grad for name, value in found.items() if value.grad is not None}

    expected = gradients(full, lambda: full(**base.inputs))
    found = gradients(skipped.model, lambda: skipped(features, **base.inputs))
    assert len(expected) == 2 * len(names) > 0
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
        assert value.any(), name
