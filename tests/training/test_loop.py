"""The loop: what it writes, how it goes on after a stop, losses that are no numbers, what dropout draws from."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from blockskip.errors import RunError
from blockskip.loading.source import ModelSource
from blockskip.method.skipping import Stub
from blockskip.training.checkpoints import latest_checkpoint
from blockskip.training.loop import PATIENCE, Metrics, Trainer, read_metrics
from blockskip.training.optimizer import learning_rate, optimizer_state
from tests.training.runs import Bar, Data, make_trainer, state_of


@pytest.fixture(scope="module")
def data(flux: ModelSource) -> Data:
    return Data(flux)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def finite(trainer: Trainer) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in state_of(trainer).values())


@pytest.mark.parametrize("source", ["flux", "sana", "sd3"], indirect=True)  # in sd3 some layers get no gradient
def test_three_steps_a_stop_and_three_more_are_six(source: ModelSource, tmp_path: Path) -> None:
    data = Data(source)
    options: dict[str, Any] = {"steps": 6, "gradient_accumulation_steps": 2, "dropout": 0.3}
    options |= {"lr_scheduler": "cosine", "lr_warmup_steps": 2}
    straight = make_trainer(source, tmp_path / "straight", **options)
    torch.manual_seed(1)
    straight.train(data.stream(), 6, Bar())

    first = make_trainer(source, tmp_path / "stopped", **options)
    torch.manual_seed(2)
    first.train(data.stream(), 3, Bar())
    first.metrics.append({"step": 4, "loss": 9.0})  # a step that was done, but no longer kept
    first.metrics.flush()
    second = make_trainer(source, tmp_path / "stopped", **options)
    found = latest_checkpoint(tmp_path / "stopped" / "checkpoints")
    assert found is not None
    torch.manual_seed(3)
    second.restore(found)
    second.train(data.stream(6), 6, Bar())

    assert same(state_of(second), state_of(straight))
    assert same(optimizer_state(second.optimizer), optimizer_state(straight.optimizer))
    written = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("straight", "stopped")]
    assert written[0] == written[1]
    for name in ("checkpoint.json", "state.safetensors"):
        ends = [(tmp_path / run / "checkpoints" / "step-000006" / name).read_bytes() for run in ("straight", "stopped")]
        assert ends[0] == ends[1]


def test_a_line_is_written_for_every_step(flux: ModelSource, data: Data, tmp_path: Path) -> None:
    trainer = make_trainer(
        flux, tmp_path, steps=5, lr_scheduler="linear", checkpoint_every=2, checkpoints_total_limit=0
    )
    trainer.train(data.stream(), 5, Bar())
    entries = read_metrics(tmp_path / "metrics.jsonl")
    assert [entry["step"] for entry in entries] == [1, 2, 3, 4, 5]
    assert [entry["learning_rate"] for entry in entries] == [learning_rate(trainer.config, step) for step in range(5)]
    assert all(math.isfinite(entry["loss"]) and entry["grad_norm"] > 0 for entry in entries)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-000002", "step-000004", "step-000005",
    ]  # fmt: skip
    found = latest_checkpoint(tmp_path / "checkpoints")
    assert found is not None
    assert same(found.adapter, state_of(trainer))
    assert same(found.optimizer, optimizer_state(trainer.optimizer))
    assert not trainer.model.model.training


def test_training_lowers_the_loss(source: ModelSource, tmp_path: Path) -> None:
    trainer, data = make_trainer(source, tmp_path, steps=30), Data(source)
    trainer.train(iter([data(0) for _ in range(30)]), 30, Bar())
    losses = [entry["loss"] for entry in read_metrics(tmp_path / "metrics.jsonl")]
    assert losses[-1] < 0.8 * losses[0]


def test_gradients_are_clipped_and_the_norm_before_is_written(flux: ModelSource, data: Data, tmp_path: Path) -> None:
    free = make_trainer(flux, tmp_path / "free", max_grad_norm=0.0)
    _, norm = free._optimizer_step(data.stream())
    trainer = make_trainer(flux, tmp_path / "clipped", max_grad_norm=norm / 10)
    grads: list[torch.Tensor] = []
    trainer.optimizer.register_step_pre_hook(
        lambda *_: grads.extend(value.grad.flatten() for value in trainer.parameters if value.grad is not None)
    )
    _, before = trainer._optimizer_step(data.stream())
    assert before == norm
    assert float(torch.cat(grads).norm()) == pytest.approx(norm / 10, rel=1e-3)


def test_one_step_without_a_number_is_left_out_and_counted(flux: ModelSource, data: Data, tmp_path: Path) -> None:
    trainer = make_trainer(flux, tmp_path, steps=4)
    trainer.train(data.stream(), 2, Bar())
    before = state_of(trainer)
    moments = {name: value.clone() for name, value in optimizer_state(trainer.optimizer).items()}
    trainer.train(data.stream(2, spoilt=(2,)), 3, Bar())
    assert trainer.skipped_steps == 1
    assert same(state_of(trainer), before)
    assert same(optimizer_state(trainer.optimizer), moments)
    trainer.train(data.stream(3), 4, Bar())
    assert not same(state_of(trainer), before)
    assert finite(trainer)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [loss is None for loss in losses] == [False, False, True, False]
    found = latest_checkpoint(tmp_path / "checkpoints")
    assert found is not None
    assert found.skipped_steps == 1
    later = make_trainer(flux, tmp_path, steps=4)
    later.restore(found)
    assert later.skipped_steps == 1


def test_one_bad_micro_batch_spoils_no_weight(flux: ModelSource, data: Data, tmp_path: Path) -> None:
    trainer = make_trainer(flux, tmp_path, gradient_accumulation_steps=4)
    before = state_of(trainer)
    trainer.train(data.stream(spoilt=(2,)), 1, Bar())
    assert same(state_of(trainer), before)
    assert trainer.skipped_steps == 1


def test_many_in_a_row_end_the_run_with_the_checkpoint_before_them_whole(
    flux: ModelSource, data: Data, tmp_path: Path
) -> None:
    trainer = make_trainer(flux, tmp_path, steps=100, checkpoint_every=2)
    spoilt = tuple(range(4, 4 + PATIENCE))
    scattered = make_trainer(flux, tmp_path / "scattered", steps=100)
    scattered.train(data.stream(spoilt=(1, 2, 3, 4, 6, 7, 8, 9)), 12, Bar())
    assert scattered.skipped_steps == 8
    assert finite(scattered)
    words = rf"not finite in {PATIENCE} steps in a row, the last of them step {4 + PATIENCE}"
    with pytest.raises(RunError, match=words):
        trainer.train(data.stream(spoilt=spoilt), 100, Bar())
    found = latest_checkpoint(tmp_path / "checkpoints")
    assert found is not None
    assert found.step >= 4
    assert all(bool(torch.isfinite(value).all()) for value in (*found.adapter.values(), *found.optimizer.values()))
    straight = make_trainer(flux, tmp_path / "straight", steps=100)
    straight.train(data.stream(), 4, Bar())
    assert same(found.adapter, state_of(straight))


def test_dropout_draws_from_seed_step_and_micro_step_alone(flux: ModelSource, data: Data, tmp_path: Path) -> None:
    def masks(global_seed: int, step: int, seed: int = 0, micro_steps: int = 2) -> list[torch.Tensor]:
        """What the first LoRA layer's dropout lets through in each micro-step."""
        trainer = make_trainer(flux, tmp_path / "run", dropout=0.5, seed=seed, gradient_accumulation_steps=micro_steps)
        trainer.step = step
        seen: list[torch.Tensor] = []
        modules = trainer.model.model.modules()
        layer = next(module for module in modules if isinstance(module, nn.Dropout) and module.p == 0.5)
        layer.register_forward_hook(lambda _, args, out: seen.append(out != 0))
        trainer.model.model.train()
        torch.manual_seed(global_seed)
        state = torch.get_rng_state()
        trainer._optimizer_step(iter([data(0)] * micro_steps))
        assert torch.equal(torch.get_rng_state(), state)
        assert 0.4 < seen[0].float().mean() < 0.6
        return seen

    first, again, longer = masks(0, 3), masks(9, 3), masks(0, 3, micro_steps=3)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert torch.equal(first[1], longer[1])
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], masks(0, 4)[0])
    assert not torch.equal(first[0], masks(0, 3, seed=1)[0])


def test_without_dropout_nothing_is_seeded(flux: ModelSource, data: Data, tmp_path: Path) -> None:
    torch.manual_seed(5)
    trainer, batches = make_trainer(flux, tmp_path), [data(0), data(1)]
    before = torch.get_rng_state()
    trainer.train(iter(batches), 2, Bar())
    assert torch.equal(torch.get_rng_state(), before)


def test_stubs_stay_stubs_through_training(source: ModelSource, tmp_path: Path) -> None:
    trainer, data = make_trainer(source, tmp_path), Data(source)
    trainer.train(data.stream(), 2, Bar())
    blocks = trainer.model.layout.blocks(trainer.model.model)
    assert [isinstance(block, Stub) for block in blocks] == [True] * 2 + [False] * (len(blocks) - 3) + [True]


def test_metrics_are_cut_back_to_a_checkpoint(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.truncate(3)
    assert read_metrics(tmp_path / "metrics.jsonl") == []
    for step in range(1, 6):
        metrics.append({"step": step, "loss": math.inf if step == 2 else step / 3})
    assert read_metrics(tmp_path / "metrics.jsonl") == []
    metrics.flush()
    metrics.truncate(3)
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 1, "loss": 1 / 3}, {"step": 2, "loss": None}, {"step": 3, "loss": 1.0},
    ]  # fmt: skip
    assert read_metrics(tmp_path / "none.jsonl") == []
