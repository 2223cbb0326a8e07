"""The training loop: optimiser steps over micro-batches, from a checkpoint to a step, and what it writes on the way."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from blockskip.adapters.lora import adapter_state, load_adapter_state
from blockskip.config import TrainConfig
from blockskip.errors import RunError
from blockskip.families import Family
from blockskip.method.skipping import SkippedModel
from blockskip.precision import compute
from blockskip.progress import Progress, say
from blockskip.seeds import derive_seed
from blockskip.store.files import write_atomically
from blockskip.training.checkpoints import Checkpoint, save_checkpoint
from blockskip.training.lisa import LisaBlocks
from blockskip.training.optimizer import learning_rate, load_optimizer_state, make_optimizer, optimizer_state
from blockskip.training.step import MicroBatch, training_loss

#: Steps in a row whose loss or gradient is not finite before the run stops.
PATIENCE = 5


@dataclass
class Trainer:
    """One stretch of training: a stubbed model with LoRA, its optimiser, and the files that record it.

    Args:
        model: front and tail are stubs; LoRA is in place.
        parameters: the trainable ones, in their fixed order.
        transformer_config: of the model.
        output: the run's folder: ``metrics.jsonl`` and ``checkpoints/`` are written there.
        fingerprint: of the settings that a continued run must share.
        blocks: those that LISA trains instead of LoRA; then ``parameters`` are theirs, and change with the period.
    """

    model: SkippedModel
    parameters: list[nn.Parameter]
    family: Family
    transformer_config: dict[str, Any]
    config: TrainConfig
    dropout: float
    guidance: float
    dtype: torch.dtype
    device: torch.device
    output: Path
    fingerprint: dict[str, str]
    step: int = 0
    skipped_steps: int = 0
    blocks: LisaBlocks | None = None
    _bad_steps: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.blocks is None:
            self.optimizer = make_optimizer(self.parameters, self.config)
        self.metrics = Metrics(self.output / "metrics.jsonl")

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint."""
        self.step, self.skipped_steps = checkpoint.step, checkpoint.skipped_steps
        if self.blocks is None:
            load_adapter_state(self.model.model, checkpoint.adapter)
        else:
            self.blocks.load(checkpoint.adapter)
        if self.blocks is None or self.step % self.blocks.period:  # else a period begins, with a fresh optimiser
            self._begin_step()
            load_optimizer_state(self.optimizer, checkpoint.optimizer)
        self.metrics.truncate(self.step)

    def state(self) -> dict[str, torch.Tensor]:
        """What was trained, float32: the adapter by PEFT's names, or weights by their full names."""
        return adapter_state(self.model.model) if self.blocks is None else self.blocks.state()

    def checkpoint(self) -> None:
        """Save the state after the current step."""
        state = Checkpoint(
            self.step, self.state(), optimizer_state(self.optimizer), self.fingerprint,
            self.skipped_steps,
        )  # fmt: skip
        self.metrics.flush()
        save_checkpoint(self.output / "checkpoints", state, self.config.checkpoints_total_limit)

    def train(self, batches: Iterator[MicroBatch], until: int, bar: Progress) -> None:
        """Optimiser steps up to ``until``; a checkpoint at its end and every ``checkpoint_every`` steps.

        Args:
            batches: micro-batches of these steps, in order.
            until: the number of steps done at the end, at most ``config.steps``.

        Raises:
            RunError: the loss was not finite for several steps in a row; the checkpoint before them is whole.
        """
        self.model.model.train()
        while self.step < until:
            loss, norm = self._optimizer_step(batches)
            self.step += 1
            rate = self.optimizer.param_groups[0]["lr"]
            self.metrics.append({"step": self.step, "loss": loss, "learning_rate": rate, "grad_norm": norm})
            bar.advance(1, f"loss {loss:.4f}")
            if self.step == until:
                self.checkpoint()
            elif self.config.checkpoint_every and self.step % self.config.checkpoint_every == 0:
                try:
                    self.checkpoint()
                except OSError as error:  # training goes on; the checkpoint before is whole
                    say(f"Warning: the checkpoint of step {self.step} could not be written ({error}).")
        self.model.model.eval()

    def _begin_step(self) -> None:
        """With LISA: where a period begins, its blocks and a fresh optimiser."""
        if self.blocks is not None and self.blocks.begin(self.step):
            self.parameters = self.blocks.parameters
            self.optimizer = make_optimizer(self.parameters, self.config)

    def _optimizer_step(self, batches: Iterator[MicroBatch]) -> tuple[float, float]:
        """One optimiser step; returns the mean loss and the gradient's norm before clipping."""
        self._begin_step()
        total = 0.0
        for micro in range(self.config.gradient_accumulation_steps):
            total += self.micro_step(next(batches), micro)
        return total, self.update(total)

    def micro_step(self, batch: MicroBatch, micro: int) -> float:
        """Forward and backward of the optimiser step's micro-batch ``micro``; returns its share of the mean loss."""
        accumulation = self.config.gradient_accumulation_steps
        batch = batch.needed(self.family).to(self.device)
        with self._dropout(micro), compute(self.device, self.dtype):
            loss = training_loss(self.model, self.family, self.transformer_config, batch, self.guidance, self.dtype)
        (loss / accumulation).backward()
        return float(loss.detach()) / accumulation

    def update(self, total: float) -> float:
        """The optimiser's part of a step whose mean loss is ``total``; returns the gradient's norm before clipping."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, self.step)
        norm = float(nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm or math.inf))
        if math.isfinite(total) and math.isfinite(norm):
            self.optimizer.step()
            if self.blocks is not None:
                self.blocks.written()
            self._bad_steps = 0
        else:
            self.skipped_steps += 1
            self._bad_steps += 1
            if self._bad_steps >= PATIENCE:
                raise RunError(
                    f"The loss was not finite in {PATIENCE} steps in a row, the last of them step {self.step + 1}. "
                    "The last good checkpoint is kept. Try a lower train.learning_rate, or model.dtype = "
                    '"bfloat16" or "float32".'
                )
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    @contextmanager
    def _dropout(self, micro: int) -> Iterator[None]:
        """Dropout draws from seed, step and micro-step alone; nothing is seeded when there is no dropout."""
        if not self.dropout:
            yield
            return
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(derive_seed(self.config.seed, "dropout", self.step, micro))
            yield


class Metrics:
    """``metrics.jsonl``: one line an optimiser step, the same bytes for the same run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: list[str] = []

    def append(self, entry: dict[str, float | int]) -> None:
        """Keep one line; it reaches the file at the next ``flush``. Values that are not finite become null."""
        finite = {name: value if math.isfinite(value) else None for name, value in entry.items()}
        self._lines.append(json.dumps(finite, sort_keys=True))

    def flush(self) -> None:
        """Append the kept lines to the file."""
        with open(self.path, "a", encoding="utf-8", newline="\n") as stream:
            stream.write("".join(f"{line}\n" for line in self._lines))
        self._lines.clear()

    def truncate(self, steps: int) -> None:
        """Keep the lines of the first ``steps`` steps only: what came after the checkpoint is done again."""
        lines = self.path.read_text(encoding="utf-8").splitlines()[:steps] if self.path.is_file() else []
        text = "".join(f"{line}\n" for line in lines)
        write_atomically(self.path, lambda path: path.write_text(text, encoding="utf-8", newline="\n"))


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The entries of a ``metrics.jsonl``."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
