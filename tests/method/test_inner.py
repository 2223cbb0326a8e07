"""A run of blocks inside the model is skipped: every stream gets its own residual, and both sides are trained."""

from typing import Any

import pytest
import torch
from torch import nn

from blockskip.errors import UserError
from blockskip.loading.resolved import split_of
from blockskip.loading.source import ModelSource
from blockskip.method.capture import capture
from blockskip.method.layout import BlockLayout
from blockskip.method.skipping import ConstantResidual, NoResidual, Stub
from blockskip.method.split import Split
from blockskip.settings import from_flat
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
from tests.tiny_families import TINY

# FLUX here has 3 double and 5 single blocks: within the double ones, up to their end, across, behind, all but the ends.
RUNS = [("flux", run) for run in ((1, 2), (1, 3), (2, 5), (3, 5), (5, 6), (1, 7))]
RUNS += [(name, run) for name in TINY if name != "flux" for run in ((1, 2), (1, 3), (4, 5))]


@pytest.mark.parametrize(("name", "run"), RUNS)
def test_zero_lora_gives_the_base_s_output_and_loss(
    request: pytest.FixtureRequest, name: str, run: tuple[int, int]
) -> None:
    """And without the residual neither."""
    source: ModelSource = request.getfixturevalue(name)
    full, split, batch = transformer(source), Split(0, 0, run), group(source)
    inputs, layout = forward_inputs(source, batch), source.family.layout
    found, losses = {}, {}
    with torch.no_grad():
        output, features = capture(full, layout, split, ConstantResidual(), inputs)
        streams = layout.returns_of(layout.names(full)[run[0]])
        assert set(features) == {f"inner.{stream}.residual" for stream in streams}
        for rule, stored in ((ConstantResidual(), features), (NoResidual(), {})):
            model = stubbed(source, split, rule)
            adapt(source, model.model, split.middle(model.num_blocks), zero=True)
            found[type(rule)] = source.family.velocity(model(stored, **inputs)[0], batch.latents)
            batch.features = stored
            losses[type(rule)] = float(loss_of(source, model, batch))
        batch.features, base = {}, source.family.velocity(output[0], batch.latents)
        whole = float(loss_of(source, stubbed(source, Split(0, 0)), batch))
    assert distance(found[ConstantResidual], base) <= 1e-6
    assert distance(found[NoResidual], base) >= 1e-4
    assert losses[ConstantResidual] == pytest.approx(whole, rel=1e-6)
    assert losses[NoResidual] != pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_gradients_reach_every_tensor_on_both_sides(source: ModelSource, checkpointing: bool) -> None:
    """They are those of the whole model in which the run's blocks only add what they added for the base."""
    full, split, batch = transformer(source), Split(0, 0, (1, 3)), group(source)
    batch.features = capture_features(source, full, split, batch)
    model = stubbed(source, split)
    middle = split.middle(model.num_blocks)
    parameters = adapt(source, model.model, middle)
    model.model.train()
    if checkpointing:
        source.family.enable_checkpointing(model.model)
    loss_of(source, model, batch).backward()
    names = source.family.layout.names(full)
    blocks = {".".join(name.split(".")[:2]) for name in parameters}
    assert blocks == {names[index] for index in middle}
    for name, value in parameters.items():
        assert value.grad is not None or unheard(source.family, full, middle, name), name
        assert unheard(source.family, full, middle, name) or value.grad.any(), name

    reference = transformer(source)
    expected = adapt(source, reference, middle)
    adding(source, reference, split, batch.features)
    batch.features = {}
    whole = stubbed(source, Split(0, 0))
    whole.model = reference
    loss_of(source, whole, batch).backward()
    for name, value in parameters.items():
        if not unheard(source.family, full, middle, name):
            assert torch.allclose(value.grad, expected[name].grad, rtol=1e-4, atol=1e-7), name


def adding(source: ModelSource, model: nn.Module, split: Split, features: dict[str, torch.Tensor]) -> None:
    """Let the first block of the run return what comes in plus the residual, and the others what comes in."""
    layout, names = source.family.layout, source.family.layout.names(model)
    for index in split.skipped(layout.count(model)):
        block = layout.blocks(model)[index]
        returns = layout.returns_of(names[index])
        reader, first = Stub(block, returns), index == split.inner[0]

        def forward(
            *args: Any, reader: Stub = reader, returns: Any = returns, first: bool = first, **kwargs: Any
        ) -> Any:
            state = reader.incoming(*args, **kwargs)
            found = tuple(state[name] + features[f"inner.{name}.residual"] * first for name in returns)
            return found if len(found) > 1 else found[0]

        block.forward = forward  # type: ignore[method-assign]


def choose(source: ModelSource, model: nn.Module, **skip: Any) -> Split:
    return split_of(from_flat({f"skip.{name}": value for name, value in skip.items()}), source.family, model)[0]


def test_it_is_placed_centrally_or_where_one_says(flux: ModelSource) -> None:
    model = transformer(flux)
    assert choose(flux, model, middle=2).inner == (3, 5)
    assert choose(flux, model, middle=3).inner == (2, 5)
    assert choose(flux, model, middle=6).inner == (1, 7)
    assert choose(flux, model, middle=3, middle_start=4, front=0, tail=0).inner == (4, 7)
    for wrong in ({"middle": 7}, {"middle": 3, "middle_start": 5}, {"middle": 40}):
        with pytest.raises(UserError, match=r"skip\.middle: blocks .* leave none to train before or after them"):
            choose(flux, model, **wrong)
    for wrong in ({"front": 1}, {"tail": 1}, {"selection": "x.json"}):
        with pytest.raises(UserError, match=r"skip\.front and skip\.tail must be 0 or left out"):
            choose(flux, model, middle=2, **wrong)


def test_streams_that_are_joined_on_the_way_are_refused(flux: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in FLUX.2, whose single blocks have one stream: a run may lie before or behind the border only."""
    returns = {"transformer_blocks": flux.family.layout.returns, "single_transformer_blocks": ("hidden_states",)}
    joined = BlockLayout(flux.family.layout.lists, returns, order="txt_img")  # type: ignore[arg-type]
    monkeypatch.setattr(type(flux.family), "layout", joined)
    model = transformer(flux, skip=())
    assert choose(flux, model, middle=2, middle_start=1).inner == (1, 3)
    assert choose(flux, model, middle=2, middle_start=4).inner == (4, 6)
    for start in (2, 3):
        with pytest.raises(UserError, match="the model joins its streams"):
            choose(flux, model, middle=2, middle_start=start)
