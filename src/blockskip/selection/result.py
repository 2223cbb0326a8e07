"""What a selection found: sweeps with intervals, the split for each ratio, and everything needed to repeat it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from blockskip import __version__
from blockskip.data.pictures import find_pictures
from blockskip.evaluation.intervals import Values, interval, rank_correlation, resampled_means
from blockskip.keys import file_sha256
from blockskip.loading.selected import FORMAT
from blockskip.method.selection import Kind, Masked, best_split
from blockskip.method.split import Split, split_for_ratio
from blockskip.selection.model import Model
from blockskip.selection.subjects import Tuned, training_of
from blockskip.selection.velocity import SIGMAS, Velocities
from blockskip.store.files import write_atomically

#: Of the sets whose distances are compared: all kinds but the empty one.
KINDS: tuple[Kind, ...] = ("front", "back", "window", "block")
#: Of attention, which only grows with the first blocks and with the last: those would agree whatever it says.
KINDS_OF_SUMS: tuple[Kind, ...] = ("window", "block")
LABELS = {"block": "single blocks"}


@dataclass(frozen=True)
class Sweep:
    """Distances of a probe for every set of blocks.

    Args:
        sets: what was masked.
        values: (adapters, pictures, sets).
        means: (resamples, sets), of resampled adapters and pictures.
    """

    sets: tuple[Masked, ...]
    values: Values
    means: Values

    @classmethod
    def of(cls, sets: Sequence[Masked], values: Values) -> Sweep:
        """With means that are drawn anew, the same every time."""
        return cls(tuple(sets), values, resampled_means(values))

    def places(self, kind: Kind) -> list[int]:
        """Where the sets of a kind stand, by their number."""
        return sorted((i for i, item in enumerate(self.sets) if item.kind == kind), key=lambda i: self.sets[i].number)

    def mean(self, kind: Kind) -> Values:
        """The mean distance of each set of a kind."""
        found: Values = self.values.mean((0, 1))[self.places(kind)]
        return found

    def ends(self, kind: Kind) -> tuple[Values, Values]:
        """The 95% interval of each of these."""
        return interval(self.means[:, self.places(kind)])

    def entries(self, kind: Kind) -> list[dict[str, Any]]:
        """``{"number", "blocks", "mean", "low", "high"}`` of each set of a kind."""
        low, high = self.ends(kind)
        return [
            {"number": self.sets[place].number, "blocks": list(self.sets[place].blocks), "mean": float(mean),
             "low": float(below), "high": float(above)}
            for place, mean, below, above in zip(self.places(kind), self.mean(kind), low, high, strict=True)
        ]  # fmt: skip

    def split(self, count: int) -> Split:
        """Eq. 2 for k = ``count``."""
        return best_split([0.0, *self.mean("front")], [0.0, *self.mean("back")], count)

    def chosen_in(self, count: int) -> dict[Split, float]:
        """How often each split is chosen when adapters and pictures are drawn anew, the most frequent first."""
        front, back = self.places("front"), self.places("back")
        splits = [best_split([0.0, *row[front].tolist()], [0.0, *row[back].tolist()], count) for row in self.means]
        counts = {split: splits.count(split) / len(splits) for split in dict.fromkeys(splits)}
        return dict(sorted(counts.items(), key=lambda item: -item[1]))


def attention_sweep(sets: Sequence[Masked], attention: Values) -> Sweep:
    """What the blocks of each set read of the text together: the sum of their attention, mean over noise levels.

    Args:
        attention: (adapters, pictures, sigmas, blocks).
    """
    by_block = attention.mean(2)
    return Sweep.of(sets, np.stack([by_block[..., list(item.blocks)].sum(-1) for item in sets], axis=-1))


def agreement(
    first: Sweep, second: Sweep, counts: Sequence[int], kinds: Sequence[Kind] = KINDS
) -> dict[str, float | None]:
    """How well one probe foretells another: Spearman's rho over the sets of each kind, and the splits of each size.

    None where one of the two finds no difference between them, so that there is no order to compare.
    """
    found = {}
    for kind in kinds:
        if min(len(first.places(kind)), len(second.places(kind))) > 1:
            found[LABELS.get(kind, kind)] = rank_correlation(first.mean(kind), second.mean(kind))
    for count in counts:
        if count > 1:
            one, other = (
                np.asarray([front + back for front, back in zip(
                    [0.0, *sweep.mean("front")[:count]], [0.0, *sweep.mean("back")[:count]][::-1], strict=True)])
                for sweep in (first, second)
            )  # fmt: skip
            found[f"splits of {count}"] = rank_correlation(one, other)
    return {name: None if math.isnan(value) else value for name, value in found.items()}


def document(
    model: Model,
    tuned: Sequence[Tuned],
    encoder: str,
    counts: dict[float, int],
    sweeps: dict[str, Sweep],
    velocities: Velocities | None,
) -> dict[str, Any]:
    """The result as it is written; the first sweep chooses.

    Args:
        counts: k by ratio.
        sweeps: by probe.
        velocities: the probe of velocity's own, with the attention to the subject, which is held against every sweep.
    """
    request, first, sizes = model.request, next(iter(sweeps.values())), sorted(set(counts.values()))
    others, attention = dict(list(sweeps.items())[1:]), {}
    chosen = {count: first.split(count) for count in sizes}
    if velocities is not None:
        read = attention_sweep(sweeps["velocity"].sets, velocities.attention)
        unnamed = "the caption" if model.source.family.layout.cross else "all text"
        attention = {
            "to": "the subject" if velocities.words else unnamed,
            "words": list(velocities.words),
            "blocks": read.entries("block"),
            "by_sigma": velocities.attention.mean((0, 1)).tolist(),
            "agreement": {name: agreement(sweep, read, sizes, KINDS_OF_SUMS) for name, sweep in sweeps.items()},
            "splits": {str(ratio): list(_pair(read.split(count))) for ratio, count in counts.items()},
        }
    return {
        "format": FORMAT,
        "blockskip": __version__,
        "model": {
            "path": request.model, "revision": request.revision, "identity": list(model.identity),
            **({"transformer": request.transformer} if request.transformer else {}),
        },
        "family": model.source.family.name,
        "blocks": list(model.blocks),
        "probe": next(iter(sweeps)),
        "splits": [
            {"ratio": ratio, "skipped": count, "front": chosen[count].front, "tail": chosen[count].tail,
             "chosen_in": dict(_named(first.chosen_in(count))),
             "other_probes": {name: list(_pair(sweep.split(count))) for name, sweep in others.items()},
             "paper_shares": list(_pair(split_for_ratio(ratio, model.num_blocks)))}
            for ratio, count in counts.items()
        ],
        "distances": {kind: first.entries(kind) for kind in ("front", "back", "window")},
        "other_probes": {name: {kind: sweep.entries(kind) for kind in KINDS} for name, sweep in others.items()},
        "agreement": {name: agreement(first, sweep, sizes) for name, sweep in others.items()},
        "attention": attention,
        "made_with": _made_with(model, tuned, encoder, velocities),
    }  # fmt: skip


def _made_with(model: Model, tuned: Sequence[Tuned], encoder: str, velocities: Velocities | None) -> dict[str, Any]:
    """What the selection can be repeated with; of pictures and adapters the hashes, in the order of their names."""
    request, source, sampling = model.request, model.source, model.sampling
    probe: dict[str, Any] = {}
    if velocities is not None:
        probe = {
            "sigmas": list(SIGMAS), "pictures_of_each": velocities.distances.shape[1], "seed": request.seed,
            "guidance_input": source.family.defaults.guidance_scale,
        }  # fmt: skip
    return {
        "adapters": [
            {"subject": one.subject.name, "caption": one.subject.caption, "prompts": list(one.subject.prompts),
             "sha256": model.adapters(one.adapter).identity()[0],
             "pictures": [] if one.subject.images is None else
             [file_sha256(path) for path in find_pictures(one.subject.images)]}
            for one in tuned
        ],
        "encoder": encoder, "seeds": list(model.seeds), "size": list(model.size), "text_length": source.text_length,
        "window": request.width_of_window(model.num_blocks),
        "tokenizers": list(model.tokenizers), "scheduler": sampling.scheduler, "steps": sampling.steps,
        "guidance": {"input": sampling.guidance_input, "classifier_free": sampling.guidance_scale},
        "negative_prompt": sampling.negative_prompt,
        "velocity": probe, "dtype": str(model.dtype).removeprefix("torch."), "device": model.device.type,
        "versions": {name: version(name) for name in ("torch", "diffusers", "transformers", "peft")},
        "training": {} if request.loras else training_of(request),
    }  # fmt: skip


def write_document(path: Path, content: dict[str, Any]) -> None:
    """Write the result file, whole or not at all.

    Raises:
        ValueError: a value is not finite, which JSON has no word for; nothing is written.
    """
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _pair(split: Split) -> tuple[int, int]:
    return split.front, split.tail


def _named(shares: dict[Split, float]) -> list[tuple[str, float]]:
    return [(f"{split.front}, {split.tail}", share) for split, share in shares.items()]
