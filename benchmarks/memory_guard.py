"""Holds the planned device memory of published models to what it was: a peak that rises by more than 1% fails.

    python -m benchmarks.memory_guard               compares with benchmarks/memory_guard.json
    python -m benchmarks.memory_guard --update      writes the file anew

The settings are the package's defaults (half of the blocks skipped, rank 16) in bfloat16 on CUDA. No GPU is needed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from blockskip.planner import make_plan, make_setting, open_for_plan
from blockskip.settings import from_flat

FILE = Path(__file__).with_suffix(".json")
MODELS = {
    "FLUX.1-dev": "black-forest-labs/FLUX.1-dev",
    "SANA-1.6B": "Efficient-Large-Model/Sana_1600M_1024px_diffusers",
    "SD3.5-Large": "stabilityai/stable-diffusion-3.5-large",
    "Qwen-Image": "Qwen/Qwen-Image",
}
SETTINGS = {"model.dtype": "bfloat16", "preview.prompts": ["a photo"]}
#: By how much a peak may rise.
TOLERANCE = 0.01

#: Device bytes by model and phase.
Peaks = dict[str, dict[str, int]]


def planned_peaks() -> Peaks:
    """What the planner says now."""
    found: Peaks = {}
    for name, path in MODELS.items():
        setting = make_setting(open_for_plan(path)[0], from_flat(SETTINGS), torch.device("cuda"))
        plan = make_plan(setting, remember=False)
        found[name] = {phase: one.device_peak_bytes for phase, one in plan.used().items()}
    return found


def raised(before: Peaks, now: Peaks) -> list[str]:
    """A sentence for every peak that rose by more than the tolerance, or is guarded and no longer planned."""
    found = []
    for model, phases in before.items():
        for phase, old in phases.items():
            new = now.get(model, {}).get(phase)
            if new is None:
                found.append(f"{model}, {phase}: {old:,} bytes before, now not planned.")
            elif new > old * (1 + TOLERANCE):
                found.append(f"{model}, {phase}: {old:,} bytes before, {new:,} now ({new / old - 1:+.1%}).")
    return found


def read(file: Path = FILE) -> Peaks:
    """The peaks that are held."""
    peaks: Peaks = json.loads(file.read_text(encoding="utf-8"))
    return peaks


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare or update; the exit status is 1 where a peak rose."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_guard", description=__doc__.splitlines()[0])
    parser.add_argument("--update", action="store_true", help=f"write {FILE.name} anew")
    options = parser.parse_args(arguments)
    now = planned_peaks()
    if options.update:
        FILE.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")
        print(f"{FILE.name} is written.")
        return 0
    problems = raised(read(), now)
    print("\n".join(problems) or "No planned peak has risen.")
    return bool(problems)


if __name__ == "__main__":
    raise SystemExit(main())
