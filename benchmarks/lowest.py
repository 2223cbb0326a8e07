"""How little memory published models can be trained in, phase by phase, with at most half of their blocks skipped.

    python -m benchmarks.lowest                     no weights and no GPU are needed
    python -m benchmarks.lowest --markdown --models FLUX.1-dev

Two plans of each model are made: the trained blocks resident in NF4, and read for each run of them in bfloat16. The one
whose largest phase takes less of the device, or whose training does, is shown in full, the other by its training.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.memory_guard import MODELS
from benchmarks.paper_memory import GIB, table
from blockskip.planner import PhasePlan, Plan, make_plan, make_setting, open_for_plan
from blockskip.settings import from_flat

SETTINGS: dict[str, Any] = {
    "model.dtype": "bfloat16", "skip.ratio": 0.5, "data.text_length": 128, "train.gradient_checkpointing": True,
    "model.stream_text_encoders": True, "model.read_ahead": False, "preview.stream": True,
    "preview.prompts": ["a photo"],
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {"NF4": {"model.quantization": "nf4"}, "streamed": {"train.stream_middle": True}}
#: Pixels of training and preview, where they are not 256.
RESOLUTION = {"SANA-1.6B": 512}


@dataclass(frozen=True)
class Aim:
    """GiB: of the device while training, of the device in any phase, of the host in any phase."""

    train: float
    device: float
    host: float = 8.0


AIMS = {"FLUX.1-dev": Aim(3.0, 4.0), "SANA-1.6B": Aim(1.5, 1.5)}
HEADINGS = ("model", "trained blocks", "phase", "device", "most of it", "host", "disk")


def settings_of(model: str, way: str) -> dict[str, Any]:
    """The dotted keys of one plan."""
    side = RESOLUTION.get(model, 256)
    sizes = ("data.resolution", "data.full_resolution", "preview.height", "preview.width")
    return SETTINGS | WAYS[way] | dict.fromkeys(sizes, side)


def plans_of(model: str) -> dict[str, Plan]:
    """Both plans of a model, the lower one first."""
    source, _ = open_for_plan(MODELS[model])
    plans = {
        way: make_plan(make_setting(source, from_flat(settings_of(model, way)), torch.device("cuda")), remember=False)
        for way in WAYS
    }
    low = sorted(plans, key=lambda way: (plans[way].device_peak_bytes, plans[way].phases["train"].device_peak_bytes))
    return {way: plans[way] for way in low}


def held_by(phase: PhasePlan) -> str:
    """The role that holds most of a phase's device memory, with its GiB."""
    role = max(phase.device, key=phase.device.__getitem__)
    return f"{role} {phase.device[role] / GIB:.2f}"


def rows_of(model: str, plans: dict[str, Plan]) -> list[tuple[str, ...]]:
    """A row for every phase of the lower plan, and one for the training of the other."""
    rows: list[tuple[str, ...]] = []
    for number, (way, plan) in enumerate(plans.items()):
        for name, phase in plan.used().items():
            if number and name != "train":
                continue
            first = number or name == next(iter(plan.used()))
            rows.append((
                model if first and not number else "", way if first else "", name,
                f"{phase.device_peak_bytes / GIB:.2f}", held_by(phase), f"{phase.host_peak_bytes / GIB:.2f}",
                f"{phase.disk_bytes / GIB:.2f}",
            ))  # fmt: skip
    return rows


def misses(model: str, plan: Plan) -> list[str]:
    """A sentence for every aim that a plan misses, with what holds the memory."""
    aim, found = AIMS.get(model), []
    for name, phase in plan.used().items() if aim else ():
        assert aim is not None
        limit = aim.train if name == "train" else aim.device
        if phase.device_peak_bytes > limit * GIB:
            parts = ", ".join(f"{role} {size / GIB:.2f}" for role, size in phase.device.items() if size > GIB / 200)
            found.append(f"{model}, {name}: {phase.device_peak_bytes / GIB:.2f} GiB, aim {limit}; {parts}.")
        if phase.host_peak_bytes > aim.host * GIB:
            found.append(f"{model}, {name}: host {phase.host_peak_bytes / GIB:.2f} GiB, aim {aim.host}; {phase.host}.")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and every aim that is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lowest", description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--markdown", action="store_true", help="print the table as docs/memory.md has it")
    options = parser.parse_args(arguments)
    rows: list[tuple[str, ...]] = []
    missed: list[str] = []
    for model in options.models:
        plans = plans_of(model)
        rows += rows_of(model, plans)
        missed += misses(model, next(iter(plans.values())))
    print(table(HEADINGS, rows, options.markdown))
    print("\n" + ("\n".join(missed) or "Every aim is met."))


if __name__ == "__main__":
    main()
