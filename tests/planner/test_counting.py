"""The counter of live bytes: what it adds, what it takes away, and what it counts once."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import return_and_correct_aliasing

from blockskip.planner.counting import LiveBytes
from blockskip.planner.parts import fake_tensors

ITEM = 4


class Pair(torch.Tensor):
    """A tensor of two others, as quantised weights of some libraries are."""

    def __new__(cls, first: torch.Tensor, second: torch.Tensor) -> "Pair":
        return torch.Tensor._make_wrapper_subclass(cls, first.shape, dtype=first.dtype)

    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        self.first, self.second = first, second

    def __tensor_flatten__(self):  # type: ignore[no-untyped-def]
        return ["first", "second"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):  # type: ignore[no-untyped-def]
        return Pair(inner["first"], inner["second"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        halves = [
            func(*(getattr(value, name) if isinstance(value, Pair) else value for value in args), **(kwargs or {}))
            for name in ("first", "second")
        ]
        return return_and_correct_aliasing(func, args, kwargs or {}, Pair(*halves))


@pytest.fixture(params=["real", "fake"])
def live(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    """A counter that counts, of real tensors and of fake ones."""
    counter = LiveBytes()
    if request.param == "real":
        with counter:
            yield counter
    else:
        with fake_tensors(), counter:
            yield counter


def test_tensors_are_added_and_taken_away(live: LiveBytes) -> None:
    first = torch.ones(10)
    second = torch.ones(5)
    third = first.double()
    assert live.now["activations"] == (10 + 5 + 20) * ITEM
    del first, third
    assert live.now["activations"] == 5 * ITEM
    del second
    assert live.now["activations"] == 0
    assert live.device_peak == (10 + 5 + 20) * ITEM


def test_a_view_is_its_base(live: LiveBytes) -> None:
    base = torch.ones(4, 10)
    view = base.t()[2:5]
    part = base.view(-1)[3:]
    del base
    assert live.now["activations"] == 40 * ITEM  # the whole storage, as long as a part of it is asked for
    del view, part
    assert live.now["activations"] == 0
    wide = torch.zeros(()).expand(7, 9)
    assert live.now["activations"] == ITEM
    del wide


def test_what_is_written_in_place_is_not_new(live: LiveBytes) -> None:
    value = torch.ones(10)
    value.mul_(2).add_(value)
    torch.add(value, 1, out=value)
    assert live.now["activations"] == live.device_peak == 10 * ITEM


def test_the_peak_is_by_role(live: LiveBytes) -> None:
    with live.role("weights"):
        weight = torch.ones(10)
    with live.role("host"):
        waiting = torch.ones(1000)
    value = torch.ones(20)
    del value
    assert live.device_peak == 30 * ITEM
    assert (live.device_split["weights"], live.device_split["activations"]) == (10 * ITEM, 20 * ITEM)
    assert sum(live.device_split.values()) == live.device_peak
    assert (live.host_peak, live.pool_peak) == (1000 * ITEM, 1030 * ITEM)
    live.tag([waiting], "other")
    assert (live.now["host"], live.now["other"]) == (0, 1000 * ITEM)
    live.reset_peaks()
    assert live.device_peak == 1010 * ITEM
    assert live.host_peak == 0
    del weight, waiting


def test_what_existed_before_counts_from_the_moment_it_is_tagged() -> None:
    layer = nn.Linear(3, 4)
    layer.register_buffer("scale", torch.ones(5))
    live = LiveBytes()
    with live:
        live.tag_module(layer)
        live.tag_module(layer)
        assert live.now["weights"] == (12 + 4 + 5) * ITEM
    del layer
    assert live.now["weights"] == 0


def test_a_graph_holds_what_it_saved_and_gradients_are_told_apart(live: LiveBytes) -> None:
    weight = nn.Parameter(torch.ones(10))
    live.tag([weight], "adapters")
    live.watch_gradients([weight])
    product = (weight * 2).exp()  # exp keeps its output
    loss = product.sum()
    del product
    assert live.now["activations"] == (10 + 1) * ITEM
    loss.backward()
    del loss
    assert (live.now["adapters"], live.now["gradients"], live.now["activations"]) == (10 * ITEM, 10 * ITEM, 0)
    (weight * 3).sum().backward()
    assert live.now["gradients"] == 10 * ITEM
    weight.grad = None
    assert live.now["gradients"] == 0


def test_a_subclass_is_what_is_inside_it() -> None:
    live = LiveBytes()
    with live:
        pair = Pair(torch.ones(10), torch.ones(10))
        more = pair + 1
        assert isinstance(more, Pair)
        assert live.now["activations"] == 40 * ITEM
        live.tag([pair], "weights")
        assert (live.now["weights"], live.now["activations"]) == (20 * ITEM, 20 * ITEM)
        del more, pair
    assert sum(live.now.values()) == 0


def test_work_is_two_operations_a_multiply_add(live: LiveBytes) -> None:
    left, right = torch.ones(3, 5, requires_grad=True), torch.ones(5, 7)
    product = left @ right
    assert live.flops == 2 * 3 * 5 * 7
    product.sum().backward()
    assert live.flops == 2 * 2 * 3 * 5 * 7  # the right factor wants no gradient
    torch.bmm(torch.ones(2, 3, 5), torch.ones(2, 5, 7))
    assert live.flops == 4 * 2 * 3 * 5 * 7
