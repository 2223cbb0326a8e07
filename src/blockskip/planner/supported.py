"""What ``blockskip families`` prints: supported architectures, their published models, and those that are refused."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import diffusers
import torch

from blockskip.families import FAMILIES, REFUSED
from blockskip.planner.named import named_models, open_for_plan
from blockskip.planner.text import aligned, wrapped
from blockskip.presets.cards import presets_by_model

HEADINGS = ("model", "pipeline in diffusers", "parameters", "blocks", "text", "LoRA is loaded by", "preset")
NOTE = (
    "parameters: of the transformer; blocks: of each list, in the order in which they run; text: most tokens, unless "
    "`data.text_length` says otherwise. Every one of these is trained with or without skipped blocks, on quantised or "
    "streamed weights, planned (`blockskip plan`), probed for blocks to skip (`blockskip select`), and drawn with. "
    "preset: settings for a card of 6, 8, 12, 16 or 24 GB, or for a CPU: `--preset flux/8gb`, `--preset sana/cpu`."
)


@dataclass(frozen=True)
class Supported:
    """A published model of a family, or a family of which none is built in.

    Args:
        model: hub id; None where none is built in.
        parameters: of the transformer.
        blocks: of each list of blocks.
        text_length: text tokens by default.
        loader: what loads a LoRA into the pipeline, ``pipeline`` or ``PEFT``.
        presets: names for ``--preset``.
    """

    family: str
    pipeline: str
    model: str | None
    parameters: int | None
    blocks: tuple[int, ...]
    text_length: int
    loader: str
    presets: tuple[str, ...] = ()


@functools.cache
def supported() -> tuple[Supported, ...]:
    """Every family in the package's order, with its built-in published models; no weights are read."""
    models = [(name, open_for_plan(name)[0]) for name in named_models()]
    rows = []
    for family in FAMILIES:
        pipeline = getattr(diffusers, family.pipeline_class)
        loader = "pipeline" if hasattr(pipeline, "load_lora_weights") else "PEFT"
        own = [(name, source) for name, source in models if source.family is family]
        shared: tuple[Any, ...] = (family.defaults.text_length, loader)
        for name, source in own:
            with torch.device("meta"):
                model = getattr(diffusers, family.transformer_class).from_config(source.config("transformer"))
            count = sum(value.numel() for value in model.parameters())
            blocks, presets = family.layout.counts(model), presets_by_model().get(name, ())
            rows.append(Supported(family.name, family.pipeline_class, name, count, blocks, *shared, presets))
        if not own:
            rows.append(Supported(family.name, family.pipeline_class, None, None, (), *shared))
    return tuple(rows)


def families(*, as_json: bool = False) -> str:
    """The text to print, without its last line break.

    Args:
        as_json: JSON instead of the table: ``{"families": [...], "refused": {class: reason}}``.
    """
    rows = supported()
    if as_json:
        return json.dumps({"families": [asdict(row) for row in rows], "refused": dict(REFUSED)}, indent=1)
    reasons: dict[str, list[str]] = {}
    for name, reason in REFUSED.items():
        reasons.setdefault(reason, []).append(name)
    sentences = [f"Not supported: {', '.join(names)}: {reason}." for reason, names in reasons.items()]
    refused = [line for sentence in sentences for line in wrapped(sentence)]
    return "\n".join([*aligned(list(HEADINGS), [list(_cells(row)) for row in rows]), "", *wrapped(NOTE), "", *refused])


def _cells(row: Supported) -> Iterator[str]:
    yield row.model or row.family
    yield row.pipeline
    yield "-" if row.parameters is None else f"{row.parameters / 1e9:.2f} B"
    yield " + ".join(map(str, row.blocks)) or "-"
    yield str(row.text_length)
    yield row.loader
    yield row.presets[0].partition("/")[0] if row.presets else "-"
