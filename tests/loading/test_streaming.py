"""Blocks streamed from a pipeline's files: loss and gradients of the resident model, and what is in memory."""

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from blockskip.adapters.frozen import FrozenAdapters
from blockskip.errors import UserError
from blockskip.loading.source import ModelSource, open_model
from blockskip.loading.streaming import stream_blocks
from blockskip.loading.transformer import empty_transformer, load_transformer
from blockskip.loading.weights import Weights
from blockskip.method.skipping import ConstantResidual, SkippedModel
from blockskip.method.split import Split
from blockskip.precision import compute
from blockskip.training.step import training_loss
from tests.adapters.test_frozen import make_lora
from tests.families.groups import CPU, GUIDANCE, adapt, capture_features, distance, group, transformer

SPLIT = Split(1, 2)


@dataclass
class Streaming:
    """How a step is done: which spans are streamed, the rest is resident; with ``tail`` off the residual stands in."""

    tail: bool = False
    middle: bool = False
    prefetch: bool = False


def step(
    source: ModelSource,
    kind: Streaming | None,
    *,
    dtype: torch.dtype = torch.float32,
    dropout: float = 0.0,
    adapters: FrozenAdapters | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor], nn.Module]:
    """Loss, gradients and model of one training step; ``kind`` None keeps middle and tail in memory."""
    count = source.family.layout.count(empty_transformer(source))
    middle = SPLIT.middle(count)
    tail = range(middle.stop, count)
    stored = SPLIT if kind is not None and not kind.tail else Split(SPLIT.front, 0)
    batch = group(source)
    full = load_transformer(source, [], dtype, CPU, adapters)
    with compute(CPU, dtype):
        batch.features = capture_features(source, full, stored, batch, dtype=dtype)
    streamed = [] if kind is None else [*(middle if kind.middle else ()), *(tail if kind.tail else ())]
    absent = sorted({*range(SPLIT.front), *streamed, *(tail if stored.tail else ())})
    model = load_transformer(source, absent, dtype, CPU, adapters)
    if kind is not None:
        with pytest.MonkeyPatch.context() as patch:
            if kind.prefetch:  # as on a device of its own
                patch.setattr("blockskip.loading.ahead.reads_ahead", lambda device: True)
            stream_blocks(model, source, streamed, dtype, CPU, adapters)
    skipped = SkippedModel(model, source.family.layout, stored, ConstantResidual())
    parameters = adapt(source, model, middle, dropout=dropout)
    model.train()
    torch.manual_seed(8)
    with compute(CPU, dtype):
        loss = training_loss(skipped, source.family, source.config("transformer"), batch, GUIDANCE, dtype)
    loss.backward()
    return loss.detach(), {name: value.grad for name, value in parameters.items() if value.grad is not None}, model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("prefetch", [False, True], ids=["", "prefetch"])
def test_a_streamed_step_is_the_resident_one(source: ModelSource, dtype: torch.dtype, prefetch: bool) -> None:
    """Bit for bit, with dropout, in training mode; and the method's own tail is another one."""
    loss, expected, _ = step(source, None, dtype=dtype, dropout=0.2)
    for tail, middle in ((True, False), (True, True)):
        found_loss, found, model = step(source, Streaming(tail, middle, prefetch), dtype=dtype, dropout=0.2)
        assert torch.equal(found_loss, loss)
        assert found.keys() == expected.keys() == {n for n, v in model.named_parameters() if v.requires_grad}
        for name, value in expected.items():
            assert torch.equal(found[name], value), name
            assert value.any(), name
            assert value.dtype == torch.float32
    _, residual, _ = step(source, Streaming(tail=False), dtype=dtype, dropout=0.2)
    assert residual.keys() <= expected.keys()  # SD3's text leaves the middle for nowhere where the tail is skipped
    assert min(distance(value, expected[name]) for name, value in residual.items()) > 1e-3


def test_a_streamed_middle_changes_nothing_beside_a_residual(source: ModelSource) -> None:
    loss, expected, _ = step(source, Streaming())
    found_loss, found, _ = step(source, Streaming(middle=True))
    assert torch.equal(found_loss, loss)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_frozen_adapters_act_on_streamed_blocks(source: ModelSource, tmp_path: Path) -> None:
    adapters = FrozenAdapters([str(make_lora(source, tmp_path, range(2, 6)))])
    loss, expected, _ = step(source, None, adapters=adapters)
    found_loss, found, _ = step(source, Streaming(tail=True, middle=True), adapters=adapters)
    assert torch.equal(found_loss, loss)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert not torch.equal(step(source, None)[0], loss)


@dataclass
class Blocks:
    """Which blocks' tensors are alive, seen whenever one has been read."""

    alive: dict[int, str] = field(default_factory=dict)
    seen: list[tuple[str, ...]] = field(default_factory=list)
    lock: Any = field(default_factory=threading.RLock)

    def given(self, prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors in memory of arrays; each is alive until its last view is gone."""
        copies = {}
        with self.lock:
            for name, value in tensors.items():
                array = value.numpy().copy()
                self.alive[id(array)] = prefix
                weakref.finalize(array, self.alive.pop, id(array))
                copies[name] = torch.from_numpy(array)
                del array
            self.seen.append(tuple(sorted(set(self.alive.values()))))
        return copies


@contextmanager
def watched_blocks() -> Iterator[Blocks]:
    blocks, inside = Blocks(), Weights.inside
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Weights, "inside", lambda self, prefix, *args: blocks.given(prefix, inside(self, prefix, *args)))
        yield blocks


@pytest.mark.parametrize("middle", [False, True], ids=["tail", "tail and middle"])
@pytest.mark.parametrize("prefetch", [False, True], ids=["", "prefetch"])
def test_the_rest_and_one_block_are_in_memory_or_two_with_prefetch(
    source: ModelSource, middle: bool, prefetch: bool
) -> None:
    with watched_blocks() as blocks:
        _, gradients, model = step(source, Streaming(True, middle, prefetch))
        layout = source.family.layout
        count = layout.count(model)
        kept = () if middle else tuple(f"{name}." for name in layout.names(model)[: count - SPLIT.tail])
        resident = {
            name: value.nbytes for name, value in model.named_parameters()
            if value.device.type != "meta" and name not in gradients
        }  # fmt: skip
        expected = {
            name: value.nbytes for name, value in transformer(source, range(SPLIT.front)).named_parameters()
            if not name.startswith(tuple(f"{block}." for block in layout.names(model)))
            or name.startswith(kept)
        }  # fmt: skip
        assert {name.replace(".base_layer.", "."): size for name, size in resident.items()} == expected
        streamed = layout.names(model)[(SPLIT.front if middle else count - SPLIT.tail) :]
        assert {name for names in blocks.seen for name in names} == set(streamed)
        # how far ahead the thread is, is up to the machine
        assert max(len(names) for names in blocks.seen) <= 1 + prefetch
        assert len(blocks.seen) == 2 * len(streamed) + prefetch  # the last one is ahead of the next step
        del model, gradients, resident
        gc.collect()
        deadline = time.monotonic() + 10
        while blocks.alive and time.monotonic() < deadline:  # the thread's last block dies with the thread
            time.sleep(0.01)
        assert not blocks.alive


def test_a_tensor_that_the_file_lacks_is_told(flux: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_model(str(flux.folder))
    model = load_transformer(source, range(8), torch.float32, CPU)
    name = "single_transformer_blocks.4.proj_mlp.weight"
    under = Weights.under
    monkeypatch.setattr(Weights, "under", lambda self, prefix: [key for key in under(self, prefix) if key != name])
    with pytest.raises(UserError, match=f'lacks the tensor "{name}"; fetch the model again'):
        stream_blocks(model, source, [7], torch.float32, CPU)
