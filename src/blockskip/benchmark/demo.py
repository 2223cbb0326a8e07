"""The demonstration: plain LoRA and DiT-BlockSkip on a subject that the built-in model has never seen, side by side."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from blockskip import builtin
from blockskip.errors import RunError, UserError
from blockskip.evaluation.encoder import ImageEncoder
from blockskip.evaluation.fidelity import Fidelity, ceiling, subject_fidelity
from blockskip.progress import say
from blockskip.report.content import Column, Report
from blockskip.report.html import write_report
from blockskip.report.text import render_text
from blockskip.run import RunResult, generate, prepare, run
from blockskip.run.previews import open_pictures, save_png
from blockskip.run.summary import column
from blockskip.settings import from_flat, leaves, to_toml

#: What both runs share: the same steps, samples a step, rank and learning rate.
SHARED: dict[str, Any] = {
    "train.steps": 120,
    "train.batch_size": 4,
    "train.gradient_accumulation_steps": 1,
    "train.learning_rate": 2e-3,
    "train.checkpoint_every": 60,
    "preview.images": 2,
    "preview.batch_size": 4,
}
#: The two settings of the one training loop.
RUNS: dict[str, dict[str, Any]] = {
    "Plain LoRA": {"skip.front": 0, "skip.tail": 0, "patches.direction": "fixed"},
    "DiT-BlockSkip": {"skip.front": 2, "skip.tail": 4, "patches.direction": "low-to-high"},  # 6 of 12 blocks: 50%
}


@dataclass(frozen=True)
class Subject:
    """A subject that comes with the package: pictures to learn from, and others kept back for measuring."""

    name: str
    train: Path
    heldout: list[Image.Image]
    prompt: str
    prompts: tuple[str, ...]


def open_subject(name: str | None) -> Subject:
    """A built-in subject of the development set; the first one when no name is given.

    Raises:
        UserError: there is no subject of that name, or it is one of the final test.
    """
    known = builtin.subjects("development")
    if name is not None and name not in known:
        kept = name in builtin.subjects("test")
        why = "is kept for the final test" if kept else "is not built in"
        raise UserError(f'--subject "{name}" {why}; there are {", ".join(known)}.')
    folder = builtin.subject_path(name or known[0])
    about = json.loads((folder / "subject.json").read_text(encoding="utf-8"))
    heldout = open_pictures(sorted((folder / "heldout").glob("*.webp")))
    return Subject(about["name"], folder / "train", heldout, about["instance_prompt"], tuple(about["preview_prompts"]))


def demo(output: Path, subject_name: str | None = None, steps: int | None = None) -> str:
    """Run the demonstration, write ``output/report.html`` and return its figures as text.

    Each training runs in a process of its own, so that its memory is its own. An interrupted demonstration continues.
    """
    subject = open_subject(subject_name)
    encoder = ImageEncoder()  # its package is missed now rather than after the trainings
    began = time.monotonic()
    results: dict[str, RunResult] = {}
    for name, settings in RUNS.items():
        say(f"== {name}")
        results[name] = _run_apart(output / _folder(name), subject, settings, steps)
    say("== the base model, same prompts and seeds")
    base = _base_pictures(output / "base", subject)
    say("== measuring")
    floor = _fidelity(base, subject, encoder)
    train = open_pictures(sorted(subject.train.glob("*.webp")))
    top = ceiling(train, subject.heldout, encoder)
    columns = [Column("Base model", base, fidelity=Fidelity(floor, floor, top))]
    for name, result in results.items():
        if not result.samples:
            raise RunError(f"The pictures of {name} are missing: drawing them failed, as its warning above says.")
        value = _fidelity(result.samples, subject, encoder)
        columns.append(column(name, result, fidelity=Fidelity(value, floor, top)))
    report = Report(
        title="A subject learnt from five pictures",
        subtitle=f'The built-in FLUX model, "{subject.prompt}", {SHARED["train.steps"] if steps is None else steps} '
        "optimiser steps; every row has the same prompt and seeds, drawn at the model's own 64 px",
        subject_pictures=train,
        prompts=list(subject.prompts),
        columns=columns,
    )
    write_report(report, output / "report.html")
    minutes = (time.monotonic() - began) / 60
    return f"{render_text(report)}\n\n{output / 'report.html'}  ({minutes:.1f} minutes)"


def _run_apart(folder: Path, subject: Subject, settings: dict[str, Any], steps: int | None) -> RunResult:
    values = {
        **SHARED, **settings, "data.images": str(subject.train), "data.prompt": subject.prompt, "output": str(folder),
        "preview.prompts": list(subject.prompts),
    }  # fmt: skip
    if steps is not None:
        values["train.steps"] = steps
    if settings.get("patches.direction") == "fixed":
        values["data.resolution"] = prepare(from_flat(values)).config.data.full_resolution
    config = from_flat({name: value for name, value in values.items() if name in leaves()})
    folder.mkdir(parents=True, exist_ok=True)
    settings_file = folder / "demo.toml"
    settings_file.write_text(to_toml(config), encoding="utf-8")
    command = [sys.executable, "-m", "blockskip.cli", "train", "--config", str(settings_file)]
    code = subprocess.run(command, check=False).returncode
    if code:
        raise RunError(f"The training in {folder} ended with code {code}; its own message stands above.")
    return run(prepare(config))  # finished: this reads what it wrote


def _base_pictures(folder: Path, subject: Subject) -> list[list[Image.Image]]:
    count = SHARED["preview.images"]
    pictures = generate(subject.prompts, images=count, batch_size=SHARED["preview.batch_size"])
    rows = [pictures[start : start + count] for start in range(0, len(pictures), count)]
    folder.mkdir(parents=True, exist_ok=True)
    for number, row in enumerate(rows):
        for index, image in enumerate(row):
            save_png(folder / f"{number:02d}-{index}.png", image)
    return rows


def _fidelity(rows: Sequence[Sequence[Image.Image]], subject: Subject, encoder: ImageEncoder) -> float:
    return subject_fidelity([image for row in rows for image in row], subject.heldout, encoder)


def _folder(name: str) -> str:
    return name.lower().replace(" ", "-")
