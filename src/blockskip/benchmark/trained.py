"""One training of the benchmark: the ordinary run with the settings of a row, and what it took."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

from blockskip.adapters.files import find_lora
from blockskip.benchmark.model import Model
from blockskip.benchmark.settings import Setting
from blockskip.benchmark.subjects import Subject
from blockskip.loading.weights import Weights
from blockskip.measure import Peaks
from blockskip.run import prepare, run
from blockskip.run.adapter import save_adapter
from blockskip.run.job import RunResult
from blockskip.run.prepare import Prepared
from blockskip.settings import from_flat, to_flat
from blockskip.store.files import write_atomically
from blockskip.training.checkpoints import latest_checkpoint

#: Settings that name places of this machine.
PLACES = ("output", "data.images", "features.cache", "model.path", "model.transformer")


def configured(model: Model, setting: Setting, subject: Subject, seed: int) -> dict[str, Any]:
    """The settings of a run by dotted key, but for its folder."""
    request = model.request
    training = from_flat(dict(request.training_of())).train
    values = {
        **request.training_of(),
        **setting.config(model.num_blocks, model.full_resolution, model.resolution),
        "model.path": request.model, "model.revision": request.revision, "model.transformer": request.transformer,
        "model.dtype": request.dtype,
        "train.device": request.device, "train.seed": seed,
        "data.images": subject.train, "data.prompt": subject.caption,
        "data.text_length": model.text_length, "train.checkpoint_every": max(1, training.steps // (request.points + 1)),
        "train.checkpoints_total_limit": 0,
    }  # fmt: skip
    if setting.rate != 1:
        values["train.learning_rate"] = training.learning_rate * setting.rate
    if "skip.ratio" in values and request.selection:
        values["skip.selection"] = request.selection
    return values


def looked_at(steps: int, points: int) -> list[int]:
    """The optimiser steps before the end after which a run is looked at."""
    every = max(1, steps // (points + 1))
    return [every * number for number in range(1, points + 1) if every * number < steps]


def train(values: dict[str, Any], folder: Path, points: int) -> dict[str, Any]:
    """Do a run, or what is left of it, and return what it was and took.

    Beside the run's own adapter the folder holds ``steps/000050/`` with that of each step that is looked at.

    Args:
        values: of ``configured``.
    """
    noted = folder / "trained.json"
    if noted.is_file():
        kept: dict[str, Any] = json.loads(noted.read_text(encoding="utf-8"))
        return kept
    prepared = prepare(from_flat({**values, "output": str(folder)}))
    result = run(prepared)
    for step in looked_at(prepared.config.train.steps, points):
        _adapter_of(prepared, step)
    facts = _facts(result)
    write_atomically(noted, lambda path: path.write_text(json.dumps(facts, indent=1), encoding="utf-8"))
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return facts


def adapter_files(folder: Path) -> tuple[Path, dict[int, Path]]:
    """The adapter of a finished training, and those of the steps that were looked at."""
    earlier = {int(path.name): find_lora(path) for path in sorted((folder / "steps").glob("*")) if path.is_dir()}
    return find_lora(folder / "adapter"), earlier


def _adapter_of(prepared: Prepared, step: int) -> None:
    checkpoint = latest_checkpoint(prepared.output / "checkpoints", only=step)
    if checkpoint is not None:
        base = Weights(prepared.source.part_folder("transformer")).identity()
        save_adapter(prepared.output / "steps" / f"{step:06d}", prepared, base, checkpoint.adapter)


def _facts(result: RunResult) -> dict[str, Any]:
    prepared = result.prepared
    config = {name: value for name, value in to_flat(prepared.config).items() if name not in PLACES}
    config["model.base_adapters"] = [Path(path).name for path in prepared.config.model.base_adapters]
    phases = {record.name: dataclasses.asdict(record) for record in result.records}
    training, planned = phases.get("train", {}), result.planned.get("train", Peaks(0, 0))
    return {
        "config": {name: list(value) if isinstance(value, tuple) else value for name, value in config.items()},
        "split": [prepared.split.front, prepared.split.tail],
        "skipped": list(prepared.split.skipped(prepared.num_blocks)),
        "num_blocks": prepared.num_blocks,
        "device": prepared.device.type,
        "parameters": dataclasses.asdict(prepared.counts),
        "seconds": {"all": sum(record.seconds for record in result.records), "train": training.get("seconds", 0.0)},
        "memory": {
            "train_host": training.get("host_peak", 0),
            "train_device": training.get("device_allocated_peak", 0),
            "train_host_planned": planned.host,
            "train_device_planned": planned.device,
            "host": max((record.host_peak for record in result.records), default=0),
            "device": max((record.device_allocated_peak for record in result.records), default=0),
        },
        "phases": phases,
        "disk_bytes": result.disk_bytes,
        "loss": sum(result.losses[-20:]) / max(1, len(result.losses[-20:])),
    }
