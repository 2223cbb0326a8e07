"""What precedes the blocks is computed once, and nothing changes: every base, and models that write in place."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from blockskip.method.ahead import AheadOfBlocks, outputs_bytes
from blockskip.method.layout import IMAGE, BlockLayout, State
from blockskip.method.skipping import install_stubs, run_block, run_head
from tests.method.bases import BASES, Base, first

LAYOUT = BlockLayout(lists=("blocks",), returns=(IMAGE,), head="head")


@pytest.fixture(scope="module", params=BASES, ids=lambda make: make.__name__)
def base(request: pytest.FixtureRequest) -> Base:
    torch.manual_seed(0)
    make: Callable[[], Base] = request.param
    return make()


def run(base: Base, keep: bool) -> tuple[torch.Tensor, list[State], int]:
    """The output, every block's state, and how often a module ahead of the blocks was called."""
    called = 0

    def count(*_: Any) -> None:
        nonlocal called
        called += 1

    layout, model = base.layout, base.model
    blocks = install_stubs(model, layout, range(layout.count(model)))
    ahead = AheadOfBlocks(model, layout, torch.device("cpu"))
    leaves = [leaf for module in ahead._modules for leaf in module.modules() if not list(leaf.children())]
    handles = [leaf.register_forward_hook(count) for leaf in leaves]
    states: list[State] = []
    state: State | None = None
    outputs = None
    with torch.no_grad():
        for index, block in blocks.items():
            stub = layout.replace(model, index, block)
            if not keep or index == 0:
                state, _ = run_block(model, layout, index, state, base.inputs)
            elif outputs is None:
                with ahead.kept() as outputs:
                    state, _ = run_block(model, layout, index, state, base.inputs)
            else:
                with ahead.given(outputs, torch.device("cpu")):
                    state, _ = run_block(model, layout, index, state, base.inputs)
            layout.replace(model, index, stub)
            states.append(state)
        assert state is not None
        with ahead.given(outputs or [], torch.device("cpu")):
            output, _ = run_head(model, layout, state, base.inputs)
    for handle in handles:
        handle.remove()
    assert not any("forward" in module.__dict__ for module in model.modules())
    for index, block in blocks.items():
        layout.replace(model, index, block)
    return first(output), states, called


def test_every_state_and_the_output_keep_their_bits(base: Base) -> None:
    expected, states, often = run(base, keep=False)
    found, again, seldom = run(base, keep=True)
    assert torch.equal(found, expected)
    for state, other in zip(states, again, strict=True):
        assert state.keys() == other.keys()
        assert all(torch.equal(value, other[name]) for name, value in state.items())
    assert seldom < often


class Toy(nn.Module):
    """Two blocks behind an embedder of the image and one of the time; ``write`` changes the latter in place."""

    def __init__(self, write: bool = False) -> None:
        super().__init__()
        self.image, self.time, self.head = nn.Linear(3, 4), nn.Linear(1, 4), nn.Linear(4, 3)
        self.blocks = nn.ModuleList([Scale(), Scale()])
        self.write = write

    def forward(self, hidden_states: torch.Tensor, time: torch.Tensor) -> tuple[torch.Tensor]:
        state, temb = self.image(hidden_states), self.time(time)
        if self.write:
            temb.mul_(2)
        for block in self.blocks:
            state = block(state, temb)
        return (self.head(state),)


class Scale(nn.Module):
    def forward(self, hidden_states: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        return hidden_states * temb


def kept(model: Toy, ahead: AheadOfBlocks, time: float) -> list[tuple[nn.Module, Any]]:
    inputs = {"hidden_states": torch.ones(1, 2, 3), "time": torch.full((1, 1), time)}
    with torch.no_grad(), ahead.kept() as outputs:
        run_block(model, LAYOUT, 0, None, inputs)
    return outputs


def test_the_image_stream_is_not_kept_and_equal_outputs_are_kept_once() -> None:
    model = Toy()
    ahead = AheadOfBlocks(model, LAYOUT, torch.device("cpu"))
    first, same, other = kept(model, ahead, 1.0), kept(model, ahead, 1.0), kept(model, ahead, 2.0)
    assert [module for module, _ in first] == [model.image, model.time]
    assert first[0][1] is None
    assert first[1][1] is same[1][1]
    assert first[1][1] is not other[1][1]
    assert outputs_bytes(first) == 16


def test_nothing_is_kept_of_a_model_that_writes_into_what_a_module_returned() -> None:
    model = Toy(write=True)
    assert kept(model, AheadOfBlocks(model, LAYOUT), 1.0) == []


def test_calls_in_another_order_are_computed() -> None:
    model = Toy()
    ahead = AheadOfBlocks(model, LAYOUT)
    outputs = kept(model, ahead, 1.0)
    inputs = {"hidden_states": torch.ones(1, 2, 3), "time": torch.full((1, 1), 3.0)}
    with torch.no_grad():
        expected, _ = run_block(model, LAYOUT, 0, None, inputs)
        with ahead.given(outputs[::-1], torch.device("cpu")):
            found, _ = run_block(model, LAYOUT, 0, None, inputs)
        with ahead.given(outputs, torch.device("cpu")):
            given, _ = run_block(model, LAYOUT, 0, None, inputs)
    assert torch.equal(found[IMAGE], expected[IMAGE])
    assert not torch.equal(given[IMAGE], expected[IMAGE])  # what was kept is what is given
