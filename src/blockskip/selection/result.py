"""What a selection found: sweeps with intervals, the split for each ratio, and everything needed to repeat it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from blockskip import __version__
from blockskip.evaluation.intervals import Values, interval, rank_correlation, resampled_means
from blockskip.loading.selected import FORMAT
from blockskip.method.selection import Kind, Masked, best_split
from blockskip.method.split import Split, split_for_ratio
from blockskip.preview.draw import Drawing
from blockskip.selection.model import Model
from blockskip.selection.subjects import Tuned, training_of
from blockskip.store.files import write_atomically


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


def agreement(first: Sweep, second: Sweep, counts: Sequence[int]) -> dict[str, float]:
    """How well one probe foretells another: Spearman's rho over the sets of each kind, and the splits of each size."""
    found = {}
    for kind in ("front", "back", "window"):
        if len(first.places(kind)) > 1:
            found[kind] = rank_correlation(first.mean(kind), second.mean(kind))
    for count in counts:
        if count > 1:
            one, other = (
                np.asarray([front + back for front, back in zip(
                    [0.0, *sweep.mean("front")[:count]], [0.0, *sweep.mean("back")[:count]][::-1], strict=True)])
                for sweep in (first, second)
            )  # fmt: skip
            found[f"splits of {count}"] = rank_correlation(one, other)
    return found


def document(
    model: Model, tuned: Sequence[Tuned], encoder: str, counts: dict[float, int], sweeps: dict[str, Sweep]
) -> dict[str, Any]:
    """The result as it is written; the first sweep chooses."""
    request, first = model.request, next(iter(sweeps.values()))
    return {
        "format": FORMAT,
        "blockskip": __version__,
        "model": {"path": request.model, "revision": request.revision, "identity": list(model.identity)},
        "family": model.source.family.name,
        "blocks": list(model.blocks),
        "probe": next(iter(sweeps)),
        "splits": [
            {"ratio": ratio, "skipped": count, "front": first.split(count).front, "tail": first.split(count).tail,
             "chosen_in": dict(_named(first.chosen_in(count))),
             "other_probes": {name: list(_pair(sweep.split(count))) for name, sweep in list(sweeps.items())[1:]},
             "paper_shares": list(_pair(split_for_ratio(ratio, model.num_blocks)))}
            for ratio, count in counts.items()
        ],
        "distances": {kind: first.entries(kind) for kind in ("front", "back", "window")},  # type: ignore[arg-type]
        "other_probes": {
            name: {kind: sweep.entries(kind) for kind in ("front", "back", "window", "block")}  # type: ignore[arg-type]
            for name, sweep in list(sweeps.items())[1:]
        },
        "agreement": {
            name: agreement(first, sweep, sorted(set(counts.values()))) for name, sweep in list(sweeps.items())[1:]
        },
        "made_with": {
            "adapters": [{"subject": one.subject.name, "caption": one.subject.caption,
                          "prompts": list(one.subject.prompts),
                          "sha256": model.adapters(one.adapter).identity()[0]} for one in tuned],
            "encoder": encoder, "seeds": list(model.seeds), "size": list(model.size),
            "steps": Drawing((), steps=request.steps).sampler_steps(model.source),
            "guidance_scale": request.guidance_scale, "dtype": str(model.dtype).removeprefix("torch."),
            "device": model.device.type, "training": {} if request.loras else training_of(request),
        },
    }  # fmt: skip


def write_document(path: Path, content: dict[str, Any]) -> None:
    """Write the result file, whole or not at all."""
    text = json.dumps(content, indent=1) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _pair(split: Split) -> tuple[int, int]:
    return split.front, split.tail


def _named(shares: dict[Split, float]) -> list[tuple[str, float]]:
    return [(f"{split.front}, {split.tail}", share) for split, share in shares.items()]
