"""Does the chosen split keep what was learnt? It and its neighbours are trained and compared on the same subjects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from blockskip import builtin
from blockskip.adapters.files import FILE_NAME
from blockskip.adapters.frozen import FrozenAdapters
from blockskip.data.kept import copy_pictures, split_pictures
from blockskip.data.pictures import find_pictures
from blockskip.errors import RunError, UserError
from blockskip.evaluation.encoders import open_encoder
from blockskip.evaluation.fidelity import subject_fidelity
from blockskip.method.split import Split
from blockskip.progress import say
from blockskip.run import run
from blockskip.run.fixed import FixedSamples, fixed_samples, heldout_loss
from blockskip.run.previews import open_pictures
from blockskip.selection.model import Model
from blockskip.selection.request import Request
from blockskip.selection.subjects import UNKNOWN, Subject, builtin_subject, prepare_plain

#: Subjects that are trained on.
SUBJECTS = 2
#: Training of a built-in model, where the user sets nothing else.
BUILTIN_VALIDATION: dict[str, Any] = {
    "train.steps": 60,
    "train.batch_size": 8,
    "train.gradient_accumulation_steps": 1,
    "train.learning_rate": 5e-4,
}
#: How far from the chosen split its neighbours lie, in blocks moved from one end to the other.
STEPS = (-2, -1, 1, 2)


def neighbours(chosen: Split, count: int, others: Sequence[Split] = ()) -> list[Split]:
    """The chosen split, those with one or two blocks moved to the other end, and further ones; none twice."""
    found = [chosen]
    found += [Split(chosen.front + step, chosen.tail - step) for step in STEPS]
    found += list(others)
    return list(dict.fromkeys(one for one in found if one.front >= 0 <= one.tail and one.front + one.tail == count))


def validate(model: Model, ratio: float, found: dict[str, Any], chosen_subjects: Sequence[Subject]) -> dict[str, Any]:
    """Train with each split, at the size that is drawn and without patches, so that nothing but the split differs.

    The held-out loss is of the whole model with the adapter, on pictures that were not trained on, as a change from
    the base's: -0.08 is 8% below it. Plain LoRA, with every block trained, stands beside the splits.

    Args:
        ratio: one of the request's.
        found: the result of the selection.
        chosen_subjects: of ``validation_subjects``.

    Returns:
        ``{"ratio", "subjects", "splits": [{"front", "tail", "heldout_change": [...], "fidelity": [...]}], "plain":
        {"heldout_change": [...], "fidelity": [...]}, ...}``: the lists by subject.

    Raises:
        RunError: a training cannot go on, or what it gave is not finite.
    """
    request = model.request
    entry = next(item for item in found["splits"] if item["ratio"] == ratio)
    chosen, shares = Split(entry["front"], entry["tail"]), Split(*entry["paper_shares"])
    splits = neighbours(chosen, entry["skipped"], [shares])
    plain = _empty()
    rows = [{"front": split.front, "tail": split.tail, **_empty()} for split in splits]
    encoder = open_encoder(request.encoder, model.device)
    for subject in chosen_subjects:
        heldout = list(subject.heldout)
        samples, references = _samples(model, subject, heldout), open_pictures(heldout)
        base = _loss(model, None, samples)
        for split, row in zip((None, *splits), (plain, *rows), strict=True):
            name = "plain" if split is None else f"{split.front}-{split.tail}"
            say(f"== {subject.name}, {'plain LoRA' if split is None else f'split ({split.front}, {split.tail})'}")
            adapter = _trained(model, subject, request.folder / "validation" / subject.name / name, split)
            row["heldout_change"].append(_loss(model, adapter, samples) / base - 1)
            row["fidelity"].append(subject_fidelity(_drawn(adapter), references, encoder))
            if not np.isfinite([row["heldout_change"][-1], row["fidelity"][-1]]).all():
                raise RunError(
                    f'The held-out loss or the fidelity with "{adapter}" is not a finite number in {model.dtype}; give '
                    "another --dtype, or a lower train.learning_rate with --config."
                )
    for row in (plain, *rows):
        row |= {f"mean_{name}": float(np.mean(row[name])) for name in _empty()}
    best = min(rows, key=lambda row: float(row["mean_heldout_change"]))
    return {
        "ratio": ratio,
        "subjects": [subject.name for subject in chosen_subjects],
        "training": validation_training(request),
        "plain": plain,
        "splits": rows,
        "chosen": [chosen.front, chosen.tail],
        "best_by_heldout_loss": [best["front"], best["tail"]],
    }


def validation_training(request: Request) -> dict[str, Any]:
    """Settings of these trainings by dotted key: those of the request, over ours for a built-in model.

    Ours are milder than what the tuned models of a selection get: those must know their subject by heart, while here
    the loss on other pictures of it is measured, which rises again once the few pictures are learnt by heart.
    """
    return {**(BUILTIN_VALIDATION if request.model in builtin.MODELS else {}), **request.training}


def _empty() -> dict[str, Any]:
    return {"heldout_change": [], "fidelity": []}


def validation_subjects(request: Request, own: Sequence[Subject]) -> list[Subject]:
    """Two subjects with pictures that are kept back.

    Of a built-in model they are two that the selection does not see. Of your own they are the first two of the
    selection, or the only one; the last quarter of their pictures, or one, is kept back, and the others are copied.

    Args:
        own: those of the selection.

    Raises:
        UserError: there are too few subjects or pictures.
    """
    if not request.loras and not request.images:
        rest = builtin.subjects("development")[request.count :][:SUBJECTS]
        if len(rest) < SUBJECTS:
            raise UserError(
                f"--validate needs {SUBJECTS} subjects beside those of the selection, and the package has "
                f"{len(builtin.subjects('development'))}; lower --count, which is {request.count}."
            )
        return [builtin_subject(name, request) for name in rest]
    return [_kept_back(request, subject) for subject in own[:SUBJECTS]]


def _kept_back(request: Request, subject: Subject) -> Subject:
    if subject.images is None:
        raise UserError(f"--validate needs the pictures of {subject.name}, which {UNKNOWN}; put them back.")
    train, kept = split_pictures(find_pictures(subject.images))
    if len(train) < 2:
        raise UserError(f'--validate keeps a picture back and "{subject.images}" has too few; put at least 3 into it.')
    return replace(
        subject, images=copy_pictures(train, request.folder / "validation" / "pictures" / subject.name),
        heldout=tuple(kept),
    )  # fmt: skip


def _trained(model: Model, subject: Subject, folder: Path, split: Split | None = None) -> Path:
    request = model.request
    settings: dict[str, Any] = {
        "preview.prompts": list(subject.prompts), "preview.images": 2, "preview.seed": request.seed,
        "preview.width": model.size[0], "preview.height": model.size[1], "preview.stream": request.stream,
        "preview.batch_size": request.batch_size, "preview.num_inference_steps": request.steps,
        "preview.guidance_scale": request.guidance_scale,
    }  # fmt: skip
    settings |= validation_training(request)
    if split is not None:
        settings |= {"skip.front": split.front, "skip.tail": split.tail}
    run(prepare_plain(model, subject, folder, **settings))
    return folder / "adapter" / FILE_NAME


def _drawn(adapter: Path) -> list[Image.Image]:
    return open_pictures(sorted((adapter.parent.parent / "samples").glob("*.png")))


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
