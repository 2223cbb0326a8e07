"""The memory figures of the paper, beside what the planner says of the same recipes.

    python -m benchmarks.paper_memory                          the table; no weights and no GPU are needed
    python -m benchmarks.paper_memory --markdown --json paper_memory.json

planned = tensors alive at most during one optimiser step, counted, + ALLOWANCE. The recipe is the paper's: bfloat16 on
CUDA, rank 64, batch 1, gradient accumulation 4 (the sum of gradients is alive in the step), no checkpointing but where
it is said, PEFT's cast of layer inputs to float32, 512 text tokens, FLUX.1's published splits. "ours" is the same with
this package's settings: without that cast. The 512 text tokens are 4 MiB, whether they are in the step or not.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from blockskip.families import Text
from blockskip.loading.source import ModelSource
from blockskip.planner import Setting, make_setting, open_for_plan
from blockskip.planner.encoding import encode_text
from blockskip.planner.phases import precompute, train
from blockskip.settings import from_flat

GIB = 2**30
#: What the published figures hold besides tensors: CUDA's allocator. One figure for all rows, bytes: of all
#: multiples of 0.01 GiB the one with the least largest relative difference over FLUX.1's figures (``best_allowance``).
ALLOWANCE = int(0.33 * GIB)
FLUX, SANA = "black-forest-labs/FLUX.1-dev", "Efficient-Large-Model/Sana_1600M_1024px_diffusers"
RECIPE = {"model.dtype": "bfloat16", "lora.rank": 64}


@dataclass(frozen=True)
class Case:
    """One published figure.

    Args:
        published: GiB.
        settings: what differs from ``RECIPE``.
        kept: of plain LoRA, train only the blocks that a split of 50% would keep.
        held: the figure is of weights and LoRA parameters alone, without a step.
        assumed: what the paper's summaries leave open; the difference is then shown and not held to anything.
    """

    model: str
    name: str
    published: float
    settings: Mapping[str, Any]
    kept: bool = False
    held: bool = False
    assumed: str = ""


@dataclass(frozen=True)
class Figure:
    """A case with its planned bytes, of the paper's recipe and of ours (None: not asked for)."""

    case: Case
    planned: int
    ours: int | None

    @property
    def difference(self) -> float:
        """Planned over published, less one."""
        return self.planned / GIB / self.case.published - 1


def _of(resolution: int, full: int, front: int = 0, tail: int = 0) -> dict[str, Any]:
    sizes = {"data.resolution": resolution, "data.full_resolution": full}
    return {"data.text_length": 512, "skip.front": front, "skip.tail": tail, **sizes}


def _sana(resolution: int, ratio: float, **others: Any) -> dict[str, Any]:
    return {"data.text_length": 300, "skip.ratio": ratio, "data.resolution": resolution, **others}


FLUX_CASES = (
    Case(FLUX, "LoRA at 512", 35.99, _of(512, 512)),
    Case(FLUX, "weights and LoRA parameters", 22.84, _of(512, 512), held=True),
    Case(FLUX, "dynamic patches only (256)", 30.48, _of(256, 512)),
    Case(FLUX, "30% skipped, 256", 20.78, _of(256, 512, 7, 10)),
    Case(FLUX, "50% skipped, 512", 12.85, _of(512, 512, 19, 10)),
    Case(FLUX, "50% skipped, 256", 10.42, _of(256, 512, 19, 10)),
)
_ASSUMED = "rank 64, 300 text tokens, SANA 1.6B"
_SPLIT = _ASSUMED + ", our split for 50%"
_CHECKPOINTS = {"train.gradient_checkpointing": True}
SANA_CASES = (
    Case(SANA, "LoRA at 1024", 8.35, _sana(1024, 0.0), assumed=_ASSUMED),
    Case(SANA, "50% skipped, 512", 3.10, _sana(512, 0.5), assumed=_SPLIT),
    *(
        Case(SANA, f"LoRA in the kept half, none skipped, {side}{words}", published, _sana(side, 0.0, **others),
             kept=True, assumed=f"{_SPLIT}, {side}")
        for side in (1024, 512)
        for words, published, others in (("", 4.14, {}), (", checkpointing", 3.82, _CHECKPOINTS))
    ),
)  # fmt: skip


def setting_of(case: Case, source: ModelSource, reference: bool) -> Setting:
    """The setting of a case: the paper's recipe, or ours."""
    cuda = torch.device("cuda")
    setting = make_setting(source, from_flat(RECIPE | dict(case.settings)), cuda, reference=reference)
    if case.kept:
        half = make_setting(source, from_flat(RECIPE | dict(case.settings) | {"skip.ratio": 0.5}), cuda)
        setting = dataclasses.replace(setting, targets=half.targets)
    return setting


def measure(cases: Sequence[Case], ours: Collection[str] | None = None) -> list[Figure]:
    """Plan the training step of every case, as the paper ran it and as this package does.

    Args:
        ours: names of the cases that are planned the second way as well; default: all.
    """
    figures: list[Figure] = []
    texts: dict[str, Text] = {}
    seen: dict[tuple[Any, ...], tuple[int, int]] = {}
    sources = {name: open_for_plan(name)[0] for name in dict.fromkeys(case.model for case in cases)}

    def peak(case: Case, reference: bool) -> tuple[int, int]:
        key = (case.model, repr(sorted(case.settings.items())), case.kept, reference)
        if key not in seen:
            setting = setting_of(case, sources[case.model], reference)
            if case.model not in texts:
                texts[case.model] = encode_text(setting)[1]
            text = texts[case.model]
            plan = train(setting, text, precompute(setting, text)[1]).plan
            seen[key] = plan.device_peak_bytes, plan.device["weights"] + plan.device["adapters"]
        return seen[key]

    for case in cases:
        step, held = peak(case, reference=True)
        own = None
        if ours is None or case.name in ours:
            own_step, own_held = peak(case, reference=False)
            own = own_held if case.held else own_step + ALLOWANCE
        figures.append(Figure(case, held if case.held else step + ALLOWANCE, own))
    return figures


def best_allowance(figures: Sequence[Figure]) -> tuple[int, float]:
    """(bytes, largest relative difference) of the multiple of 0.01 GiB that brings the figures nearest."""
    steps = [(one.planned - ALLOWANCE, one.case.published * GIB) for one in figures if not one.case.held]
    worst = {
        cents: max(abs((tensors + cents * GIB / 100) / published - 1) for tensors, published in steps)
        for cents in range(201)
    }
    cents = min(worst, key=worst.__getitem__)
    return int(cents * GIB / 100), worst[cents]


HEADINGS = ("model", "recipe", "published", "planned", "difference", "ours", "assumed")


def rows_of(figures: Sequence[Figure]) -> list[tuple[str, ...]]:
    """One row a figure; sizes in GiB."""
    rows: list[tuple[str, ...]] = []
    last = ""
    for one in figures:
        model = one.case.model.partition("/")[2].removesuffix("_1024px_diffusers")
        rows.append((
            model if model != last else "", one.case.name, f"{one.case.published:.2f}", f"{one.planned / GIB:.2f}",
            f"{one.difference:+.1%}", "–" if one.ours is None else f"{one.ours / GIB:.2f}", one.case.assumed,
        ))  # fmt: skip
        last = model
    return rows


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], markdown: bool) -> str:
    """Rows under headings: aligned for a terminal, or as Markdown."""
    if markdown:
        lines = ["| " + " | ".join(row) + " |" for row in (headings, *rows)]
        return "\n".join([lines[0], "| --- " * len(headings) + "|", *lines[1:]])
    widths = [max(len(row[column]) for row in (headings, *rows)) for column in range(len(headings))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (headings, *rows)
    )


def main(arguments: Sequence[str] | None = None) -> list[Figure]:
    """Print the table; returns its figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper_memory", description=__doc__.splitlines()[0])
    parser.add_argument("--markdown", action="store_true", help="print the table as docs/memory.md has it")
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args(arguments)
    figures = measure((*FLUX_CASES, *SANA_CASES))
    print(table(HEADINGS, rows_of(figures), options.markdown))
    best, worst = best_allowance([one for one in figures if not one.case.assumed])
    print(f"\nGiB. Allowance {ALLOWANCE / GIB:.2f}; the best for FLUX.1 is {best / GIB:.2f}, within {worst:.1%}.")
    if options.json:
        document = [dataclasses.asdict(one) | {"difference": one.difference} for one in figures]
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return figures


if __name__ == "__main__":
    main()
