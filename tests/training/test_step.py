"""The gradients of a training step: the same however a batch is cut and whatever is recomputed; float32 throughout."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from blockskip.loading.source import ModelSource
from blockskip.training import loop
from blockskip.training.loop import Trainer
from blockskip.training.step import MicroBatch
from tests.training.runs import Bar, Data, make_trainer, state_of


def gradients(trainer: Trainer, batches: list[MicroBatch]) -> dict[str, torch.Tensor]:
    """The gradients that the optimiser would have been given."""
    seen: dict[str, torch.Tensor] = {}
    names = {id(value): name for name, value in trainer.model.model.named_parameters()}

    def keep(*_: Any) -> None:
        seen.update({names[id(value)]: value.grad.clone() for value in trainer.parameters if value.grad is not None})

    trainer.optimizer.step = keep  # type: ignore[method-assign]
    trainer.model.model.train()
    trainer._optimizer_step(iter(batches))
    return seen


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """|found - expected| / |expected|, norms over all gradients together."""
    off = [(found[name] - value).flatten() for name, value in expected.items()]
    return float(torch.cat(off).norm() / torch.cat([value.flatten() for value in expected.values()]).norm())


def random_b(trainer: Trainer) -> Trainer:
    generator = torch.Generator().manual_seed(6)
    for value in trainer.parameters:
        if not value.any():
            value.data = 0.1 * torch.randn(value.shape, generator=generator)
    return trainer


def cut(batch: MicroBatch, rows: slice) -> MicroBatch:
    return MicroBatch(
        batch.latents[rows], batch.noise[rows], batch.sigma[rows], batch.weight[rows],
        {name: value[rows] for name, value in batch.text.items()},
        {name: value[rows] for name, value in batch.features.items()},
    )  # fmt: skip


def test_four_of_one_are_one_of_four(source: ModelSource, tmp_path: Path) -> None:
    batch = Data(source, batch=4)(0)
    assert len(set(batch.weight.tolist())) == 4
    options = {"max_grad_norm": 0.0}
    whole = gradients(random_b(make_trainer(source, tmp_path / "1", **options)), [batch])
    four = random_b(make_trainer(source, tmp_path / "4", gradient_accumulation_steps=4, **options))
    parts = gradients(four, [cut(batch, slice(index, index + 1)) for index in range(4)])
    two = random_b(make_trainer(source, tmp_path / "2", gradient_accumulation_steps=2, **options))
    halves = gradients(two, [cut(batch, slice(0, 2)), cut(batch, slice(2, 4))])
    assert whole.keys() == parts.keys() == halves.keys()
    assert len(whole) == len(four.parameters)
    for other in (parts, halves):
        assert difference(other, whole) <= 1e-6
    wrong = gradients(random_b(make_trainer(source, tmp_path / "w", **options)), [cut(batch, slice(0, 1))])
    assert difference(wrong, whole) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradient_checkpointing_changes_no_gradient(
    source: ModelSource, tmp_path: Path, dtype: torch.dtype, dropout: float
) -> None:
    batch, options = Data(source, dtype)(0), {"dtype": dtype, "dropout": dropout}
    plain = gradients(random_b(make_trainer(source, tmp_path / "plain", **options)), [batch])
    calls: list[int] = []
    trainer = random_b(make_trainer(source, tmp_path / "checkpointing", checkpointing=True, **options))
    first = trainer.model.layout.blocks(trainer.model.model)[2]
    first.register_forward_pre_hook(lambda *_: calls.append(1))
    found = gradients(trainer, [batch])
    assert len(calls) == 2  # it really ran again in the backward pass
    assert found.keys() == plain.keys()
    assert len(plain) == len(trainer.parameters)
    for name, value in plain.items():
        assert torch.equal(found[name], value), name
        assert value.any(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_every_adapter_tensor_is_float32_and_moves_also_at_a_small_rate(
    source: ModelSource, tmp_path: Path, dtype: torch.dtype, checkpointing: bool
) -> None:
    trainer = make_trainer(
        source, tmp_path, dtype=dtype, checkpointing=checkpointing, steps=3, learning_rate=1e-5, weight_decay=0.0
    )
    before, data = state_of(trainer), Data(source, dtype)
    base = {name: value.clone() for name, value in trainer.model.model.named_parameters() if not value.requires_grad}
    trainer.train(data.stream(), 2, Bar())
    for name, value in state_of(trainer).items():
        assert value.dtype == torch.float32
        assert not torch.equal(value, before[name]), name
    trainer.train(data.stream(2), 3, Bar())
    state = trainer.optimizer.state_dict()["state"]
    assert len(state) == len(trainer.parameters) == len(before)
    assert {value.dtype for entry in state.values() for value in entry.values()} == {torch.float32}
    for name, value in trainer.model.model.named_parameters():
        if name in base:
            assert value.grad is None
            assert torch.equal(value, base[name]), name


def test_the_loss_of_a_step_is_float32_under_a_16_bit_base(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses: list[torch.Tensor] = []
    kernel: Callable[..., torch.Tensor] = loop.training_loss

    def noted(*arguments: Any) -> torch.Tensor:
        losses.append(kernel(*arguments))
        return losses[-1]

    monkeypatch.setattr(loop, "training_loss", noted)
    for dtype in (torch.float32, torch.bfloat16):
        make_trainer(source, tmp_path, dtype=dtype)._optimizer_step(Data(source, dtype).stream())
    full, half = losses
    assert full.dtype == half.dtype == torch.float32
    assert abs(full - half) < 0.02 * full
