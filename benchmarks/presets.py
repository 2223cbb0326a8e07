"""The presets of the package, ``src/blockskip/presets/<model>/<card>.toml``, from what the planner chose.

    python -m benchmarks.presets              compares the files with ``cards.json`` and ``presets.json``
    python -m benchmarks.presets --update     writes them
    python -m benchmarks.presets --cpu        plans every model on a CPU anew (``presets.json``), then writes them
    python -m benchmarks.presets --cpu fal/AuraFlow-v0.3      plans this one anew, and keeps the others' rows

Graphics cards are those of ``benchmarks.cards``. A model has no file for a card on which nothing fits.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
import torch

from benchmarks import cards
from blockskip.method.split import skipped_count
from blockskip.planner.budget import FIRST_RATIO, RATIOS, Budget
from blockskip.planner.cards import CARDS, SHOWN, Row, as_json, from_json
from blockskip.planner.fitting import fit_config
from blockskip.presets.cards import FOLDER
from blockskip.progress import progress
from blockskip.settings import from_flat, leaves
from blockskip.units import size

FILE = Path(__file__).with_suffix(".json")
#: The folders' names: the family's own for the model that most people have, then what tells a model from it.
NAMES = {
    "black-forest-labs/FLUX.1-dev": "flux",
    "black-forest-labs/FLUX.1-schnell": "flux-schnell",
    "black-forest-labs/FLUX.2-dev": "flux2",
    "black-forest-labs/FLUX.2-klein-base-4B": "flux2-klein-4b",
    "black-forest-labs/FLUX.2-klein-base-9B": "flux2-klein-9b",
    "Efficient-Large-Model/Sana_1600M_1024px_diffusers": "sana",
    "Efficient-Large-Model/Sana_600M_1024px_diffusers": "sana-0.6b",
    "Efficient-Large-Model/SANA1.5_4.8B_1024px_diffusers": "sana1.5",
    "stabilityai/stable-diffusion-3-medium-diffusers": "sd3",
    "stabilityai/stable-diffusion-3.5-medium": "sd3.5-medium",
    "stabilityai/stable-diffusion-3.5-large": "sd3.5-large",
    "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS": "pixart-sigma",
    "PixArt-alpha/PixArt-XL-2-1024-MS": "pixart-alpha",
    "Qwen/Qwen-Image": "qwen-image",
    "Tongyi-MAI/Z-Image-Turbo": "z-image-turbo",
    "Alpha-VLLM/Lumina-Image-2.0": "lumina2",
    "fal/AuraFlow-v0.3": "aura-flow",
    "lodestones/Chroma1-HD": "chroma",
    "THUDM/CogView4-6B": "cogview4",
    "HiDream-ai/HiDream-I1-Full": "hidream",
}
#: Cards that get a file, in GB.
SIZES = (6, 8, 12, 16, 24)
#: Of ``cpu.toml``: GiB of the machine, and bytes of them for a run; the rest is the system's and the imports'.
MACHINE = 16
CPU_BYTES = 12 * 2**30
#: What is not left open on a CPU: weights as they are published, half of what float32 takes.
CPU_VALUES = {"model.dtype": "bfloat16", "train.device": "cpu"}
#: Settings on record for a CPU, beside those of a card.
CPU_SHOWN = ("features.window", "skip.ratio")
#: What the files of some models say beside the plan, since nothing in the models' own files tells it.
DRAWING: dict[str, dict[str, Any]] = {
    "Tongyi-MAI/Z-Image-Turbo": {"preview.guidance_scale": 0.0, "preview.num_inference_steps": 9},
    "black-forest-labs/FLUX.1-schnell": {"preview.num_inference_steps": 4},
}
#: Why a setting is what it is.
REASONS = {
    "data.resolution": "pixels of the patches that are trained",
    "data.text_length": "text tokens of a caption at most",
    "features.window": "memory for the states of one precompute window; smaller: weights are read more often",
    "model.dtype": "of the base",
    "model.quantization": "of the trained blocks, which would not fit as they are",
    "model.stream_text_encoders": "one layer at a time: the whole encoder would not fit",
    "model.read_ahead": "blocks that visit the card come one at a time: a second one would not fit",
    "preview.guidance_scale": "the model is distilled",
    "preview.num_inference_steps": "the model is distilled",
    "preview.stream": "previews hold one block at a time, whatever the transformer's size",
    "skip.ratio": "share of the blocks that is skipped",
    "train.device": "without a graphics card",
    "train.gradient_checkpointing": "activations are computed again in the backward pass: they would not fit",
    "train.stream_middle": "the trained blocks visit the device one by one: all of them would not fit",
}


def planned_on_cpu(model: str) -> Row:
    """What the planner chooses for a run of ``CPU_BYTES``, with the package's defaults for all that fits."""
    config = from_flat({"model.path": model, **CPU_VALUES})
    fitted = fit_config(config, {"model.path", *CPU_VALUES}, Budget(host=CPU_BYTES), torch.device("cpu"))
    plan, used = fitted.plan, fitted.plan.used()
    return Row(
        plan.model, MACHINE, not fitted.misses, plan.split, plan.num_blocks,
        {name: plan.settings[name] for name in (*SHOWN, *CPU_SHOWN)}, plan.device_peak_bytes,
        plan.host_peak_bytes, plan.disk_bytes, max(used, key=lambda name: used[name].host_peak_bytes),
    )  # fmt: skip


def read_cpu() -> list[Row]:
    """The rows of ``presets.json``."""
    return from_json(json.loads(FILE.read_text(encoding="utf-8"))) if FILE.is_file() else []


def plan_cpu(models: Sequence[str]) -> None:
    """Write ``presets.json`` with the rows of ``models`` (none: all) planned now, and the others' as they were."""
    rows = {row.model: row for row in read_cpu()}
    wanted = [name for name in NAMES if name in models] or list(NAMES)
    with progress(len(wanted), "Plans") as bar:
        for model in wanted:
            rows[model] = planned_on_cpu(model)
            document = as_json([rows[name] for name in NAMES if name in rows])
            del document["reserved_bytes"]
            FILE.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8", newline="\n")
            bar.advance(1, model)


def files() -> dict[str, str]:
    """The text of every preset by its name, from the rows on record."""
    found = {}
    for row in cards.read():
        if row.fits and row.card in SIZES:
            name = f"{NAMES[row.model]}/{row.card:g}gb"
            plan = f"blockskip plan --preset {name} --device cuda"
            place = f"on a card of {row.card:g} GB ({CARDS[int(row.card)]})"
            used = f"{size(row.device_peak_bytes)} of the card's memory (in {row.phase}),"
            used += f" {size(row.host_peak_bytes)} of the host's"
            found[name] = _text(name, place, used, plan, row, {})
    for row in read_cpu():
        if row.fits:
            name = f"{NAMES[row.model]}/cpu"
            place = f"without a graphics card, on a machine with {row.card:g} GB of memory"
            used = f"{size(row.host_peak_bytes)} of memory (in {row.phase})"
            found[name] = _text(name, place, used, f"blockskip plan --preset {name}", row, CPU_VALUES)
    return found


def settings(row: Row, further: Mapping[str, Any]) -> dict[str, Any]:
    """The dotted keys of a preset: what was chosen where it is not the default, and what the model's drawing needs."""
    chosen = {"skip.ratio": _ratio(row), "preview.stream": True, **row.settings}
    values = {**chosen, **DRAWING.get(row.model, {}), **further}
    defaults = {name: item.default for name, (_, item) in leaves().items()}
    return {name: value for name, value in values.items() if name == "skip.ratio" or value != defaults[name]}


def _ratio(row: Row) -> float:
    """The smallest ratio that the planner tries for a card and that skips as many blocks."""
    counts = {ratio: skipped_count(ratio, row.num_blocks) for ratio in (FIRST_RATIO, *RATIOS)}
    return next(ratio for ratio, count in counts.items() if count == sum(row.split))


def _text(name: str, place: str, used: str, plan: str, row: Row, further: Mapping[str, Any]) -> str:
    lines = [
        f"# {row.model} {place}:",
        "#",
        f'#     blockskip train --preset {name} --images photos/ --prompt "a photo of sks dog" --output out/',
        "#",
        f"# Planned, not measured: {used}",
        f"# and {size(row.disk_bytes)} of disk, without previews, by",
        "#",
        f"#     {plan}",
        "#",
        f"# {sum(row.split)} of {row.num_blocks} blocks are skipped. Options and a --config file override this.",
        "# Made by `python -m benchmarks.presets --update`; do not edit.",
    ]
    sections: dict[str, dict[str, Any]] = {"model": {"path": row.model}}
    for key, value in sorted(settings(row, further).items()):
        section, _, leaf = key.partition(".")
        sections.setdefault(section, {})[leaf] = value
    for section, values in sections.items():
        lines += ["", f"[{section}]"]
        for leaf, value in values.items():
            reason = REASONS.get(f"{section}.{leaf}")
            lines.append(tomli_w.dumps({leaf: value}).strip() + (f"  # {reason}" if reason else ""))
    return "\n".join(lines) + "\n"


def on_disk() -> dict[str, str]:
    """The text of every preset that the package has, by its name."""
    return {
        path.relative_to(FOLDER).with_suffix("").as_posix(): path.read_text(encoding="utf-8")
        for path in FOLDER.glob("*/*.toml")
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare or write; the exit status is 1 where the files are not those of the rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.presets", description=__doc__.splitlines()[0])
    parser.add_argument("--update", action="store_true", help="write the files")
    parser.add_argument(
        "--cpu", nargs="*", metavar="MODEL", help=f"plan CPUs anew ({FILE.name}), and write the files; default: all"
    )
    options = parser.parse_args(arguments)
    if options.cpu is not None:
        plan_cpu(options.cpu)
    wanted = files()
    if options.update or options.cpu is not None:
        for name in on_disk().keys() - wanted.keys():
            (FOLDER / f"{name}.toml").unlink()
        for name, text in wanted.items():
            path = FOLDER / f"{name}.toml"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="\n")
        return 0
    same = on_disk() == wanted
    print("The presets are those of the rows." if same else "The presets are not those of the rows: --update.")
    return not same


if __name__ == "__main__":
    raise SystemExit(main())
