"""Short trainings of tiny pipelines, without the phases before them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from blockskip.adapters.lora import adapter_state, add_lora
from blockskip.config import TrainConfig
from blockskip.loading.source import ModelSource
from blockskip.loading.transformer import empty_transformer
from blockskip.method.skipping import ConstantResidual, Features, SkippedModel
from blockskip.method.split import Split
from blockskip.precision import compute
from blockskip.training.loop import Trainer
from blockskip.training.step import MicroBatch
from tests.families.groups import ALPHA, CPU, GUIDANCE, RANK, capture_features, group, layers, transformer

SPLIT = Split(2, 1)


class Bar:
    """A progress bar that nobody sees."""

    def advance(self, n: int = 1, note: str = "") -> None:
        """Nothing."""


class Data:
    """Micro-batches with features, each captured once; every call gives fresh tensors."""

    def __init__(self, source: ModelSource, dtype: torch.dtype = torch.float32, batch: int = 2) -> None:
        self.source, self.batch = source, batch
        self.full = transformer(source, dtype=dtype)
        self.dtype = dtype
        self.features: dict[int, Features] = {}

    def __call__(self, index: int) -> MicroBatch:
        """Micro-batch ``index``."""
        made = group(self.source, self.batch, seed=index)
        if index not in self.features:
            with compute(CPU, self.dtype):
                self.features[index] = capture_features(self.source, self.full, SPLIT, made, dtype=self.dtype)
        made.features = {name: value.clone() for name, value in self.features[index].items()}
        return made

    def stream(self, start: int = 0, spoilt: tuple[int, ...] = ()) -> Iterator[MicroBatch]:
        """Micro-batches from ``start`` on; the latents of those in ``spoilt`` are not numbers."""
        index = start
        while True:
            made = self(index % 8)
            if index in spoilt:
                made.latents[0, 0, 0, 0] = float("nan")
            yield made
            index += 1


def make_trainer(
    source: ModelSource, output: Path, *, dtype: torch.dtype = torch.float32, dropout: float = 0.0,
    checkpointing: bool = False, **train: Any,
) -> Trainer:  # fmt: skip
    """A trainer at step 0; B is zero, as in a real run."""
    output.mkdir(parents=True, exist_ok=True)
    count = source.family.layout.count(empty_transformer(source))
    model = transformer(source, SPLIT.skipped(count), dtype)
    skipped = SkippedModel(model, source.family.layout, SPLIT, ConstantResidual())
    names = layers(source, model, SPLIT.middle(count))
    parameters = add_lora(model, names, RANK, ALPHA, dropout, seed=1)
    if checkpointing:
        model.enable_gradient_checkpointing()  # type: ignore[operator]
    config = TrainConfig(**({"steps": 6, "gradient_accumulation_steps": 1, "learning_rate": 1e-2} | train))
    return Trainer(
        skipped, parameters, source.family, source.config("transformer"), config, dropout, GUIDANCE, dtype, CPU, output,
        {"seed": "0"},
    )  # fmt: skip


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """A copy of the adapter."""
    return {name: value.clone() for name, value in adapter_state(trainer.model.model).items()}
