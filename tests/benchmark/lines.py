"""Lines of results made by hand, with everything that the table reads."""

import json
from pathlib import Path
from typing import Any

ENCODER, SIZE = "eye", "64x64"


def line(
    setting: str, subject: str, loss: float, cosines: list[float], seed: int = 0, **changes: Any
) -> dict[str, Any]:
    """A line of a setting: its held-out loss at every noise level, and the cosine of each picture."""
    heldout = {SIZE: [loss - 0.1, loss, loss + 0.1]}
    fidelity = {ENCODER: {"real": [value / 2 for value in cosines], "drawable": cosines}}
    run = {
        "config": {"train.steps": 10, "data.resolution": 64}, "skipped": [0, 6, 7], "num_blocks": 8, "device": "cpu",
        "seconds": {"all": 30.0, "train": 20.0},
        "memory": {"train_host": 3 * 2**20, "train_device": 0, "host": 5 * 2**20, "device": 0,
                   "train_host_planned": 2 * 2**20, "train_device_planned": 0},
    }  # fmt: skip
    point = {"step": 5, "heldout": heldout, "fidelity": fidelity}
    return {
        "setting": setting, "title": setting.upper(), "subject": subject, "seed": seed, "heldout": heldout,
        "fidelity": fidelity, "prompt": [0.5] * len(cosines), "background": [1.0, 0.0], "drift": {ENCODER: [0.1, 0.3]},
        "curve": [point, {**point, "step": 10}], "run": run, "prompts": ["a", "b"], **changes,
    }  # fmt: skip


def base(subject: str, loss: float, cosines: list[float], top: float) -> dict[str, Any]:
    """The base model's line, with the ceiling of subject fidelity."""
    found = line("base", subject, loss, cosines)
    ceiling = {"fidelity": {ENCODER: {"real": top / 2, "drawable": top}}, "prompt": [0.9], "background": [1.0]}
    return {name: value for name, value in found.items() if name not in ("run", "curve", "drift")} | {
        "ceiling": ceiling
    }


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    """The file of some lines."""
    path.write_text("".join(json.dumps(item) + "\n" for item in lines), encoding="utf-8")
    return path


def two_subjects() -> list[dict[str, Any]]:
    """Plain LoRA and one other setting on two subjects, with round numbers."""
    return [
        base("cat", 2.0, [0.4, 0.4], 0.8), line("lora", "cat", 1.0, [0.6, 0.8]), line("resize", "cat", 1.5, [0.5, 0.5]),
        base("dog", 3.0, [0.2, 0.2], 0.7), line("lora", "dog", 1.0, [0.7, 0.7]), line("resize", "dog", 1.5, [0.2, 0.7]),
    ]  # fmt: skip
