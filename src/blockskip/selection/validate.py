"""Does the chosen split keep what was learnt? It and its neighbours are trained and compared on the same subjects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from blockskip.adapters.files import FILE_NAME
from blockskip.adapters.frozen import FrozenAdapters
from blockskip.evaluation.encoders import open_encoder
from blockskip.evaluation.fidelity import subject_fidelity
from blockskip.method.split import Split
from blockskip.progress import say
from blockskip.run import run
from blockskip.run.fixed import FixedSamples, fixed_samples, heldout_loss
from blockskip.run.previews import open_pictures
from blockskip.selection.model import Model
from blockskip.selection.request import Request
from blockskip.selection.subjects import Subject, prepare_plain, subjects

#: Subjects that are trained on.
SUBJECTS = 2
#: How far from the chosen split its neighbours lie, in blocks moved from one end to the other.
STEPS = (-2, -1, 1, 2)


def neighbours(chosen: Split, count: int, others: Sequence[Split] = ()) -> list[Split]:
    """The chosen split, those with one or two blocks moved to the other end, and further ones; none twice."""
    found = [chosen]
    found += [Split(chosen.front + step, chosen.tail - step) for step in STEPS]
    found += list(others)
    return list(dict.fromkeys(one for one in found if one.front >= 0 <= one.tail and one.front + one.tail == count))


def validate(model: Model, ratio: float, found: dict[str, Any]) -> dict[str, Any]:
    """Train with each split, at the size that is drawn and without patches, so that nothing but the split differs.

    The held-out loss is of the whole model with the adapter, on pictures that were not trained on, given as the share
    of plain LoRA's improvement over the base.

    Args:
        ratio: one of the request's.
        found: the result of the selection.

    Returns:
        ``{"ratio", "subjects", "splits": [{"front", "tail", "heldout_share": [...], "fidelity": [...]}], ...}``.
    """
    request = model.request
    entry = next(item for item in found["splits"] if item["ratio"] == ratio)
    chosen, shares = Split(entry["front"], entry["tail"]), Split(*entry["paper_shares"])
    splits = neighbours(chosen, entry["skipped"], [shares])
    chosen_subjects = _subjects(request)
    rows: list[dict[str, Any]] = [
        {"front": split.front, "tail": split.tail, "heldout_share": [], "fidelity": []} for split in splits
    ]
    encoder = open_encoder(request.encoder, model.device)
    for subject in chosen_subjects:
        heldout = list(subject.heldout)
        samples = _samples(model, subject, heldout)
        base = _loss(model, None, samples)
        folder = request.folder / "validation" / subject.name
        plain = _trained(model, subject, folder / "plain")
        learnt = base - _loss(model, plain, samples)
        references = open_pictures(heldout)
        for split, row in zip(splits, rows, strict=True):
            say(f"== {subject.name}, split ({split.front}, {split.tail})")
            adapter = _trained(model, subject, folder / f"{split.front}-{split.tail}", split)
            row["heldout_share"].append((base - _loss(model, adapter, samples)) / learnt)
            pictures = open_pictures(sorted((adapter.parent.parent / "samples").glob("*.png")))
            row["fidelity"].append(subject_fidelity(pictures, references, encoder))
    for row in rows:
        row["mean_heldout_share"], row["mean_fidelity"] = (
            float(np.mean(row[name])) for name in ("heldout_share", "fidelity")
        )
    best = max(rows, key=lambda row: row["mean_heldout_share"])
    return {
        "ratio": ratio,
        "subjects": [subject.name for subject in chosen_subjects],
        "splits": rows,
        "chosen": [chosen.front, chosen.tail],
        "best_by_heldout_loss": [best["front"], best["tail"]],
    }


def _subjects(request: Request) -> list[Subject]:
    """Two subjects with kept-back pictures; of a built-in model two that the selection did not see."""
    if request.images:
        return subjects(replace(request, count=SUBJECTS))
    return subjects(replace(request, loras=(), count=request.count + SUBJECTS))[-SUBJECTS:]


def _trained(model: Model, subject: Subject, folder: Path, split: Split | None = None) -> Path:
    request = model.request
    settings: dict[str, Any] = {
        "preview.prompts": list(subject.prompts), "preview.images": 2, "preview.seed": request.seed,
        "preview.width": model.size[0], "preview.height": model.size[1], "preview.stream": request.stream,
        "preview.batch_size": request.batch_size, "preview.num_inference_steps": request.steps,
        "preview.guidance_scale": request.guidance_scale,
    }  # fmt: skip
    if split is not None:
        settings |= {"skip.front": split.front, "skip.tail": split.tail}
    run(prepare_plain(model, subject, folder, **settings))
    return folder / "adapter" / FILE_NAME


def _samples(model: Model, subject: Subject, pictures: Sequence[Path]) -> FixedSamples:
    return fixed_samples(
        model.source, pictures, [subject.caption] * len(pictures), model.size, model.dtype, model.device,
        seed=model.request.seed, stream=model.request.stream,
    )  # fmt: skip


def _loss(model: Model, adapter: Path | None, samples: FixedSamples) -> float:
    adapters = FrozenAdapters([str(adapter)]) if adapter is not None else None
    guidance = model.source.family.defaults.guidance_scale
    losses = heldout_loss(
        model.source, adapters, samples, model.dtype, model.device, guidance=guidance, stream=model.request.stream
    )
    return float(np.mean(losses))
