"""From pictures to numbers: subject fidelity, prompt fidelity, backgrounds, drift. One value a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image

from blockskip.benchmark.instruments import Instruments
from blockskip.benchmark.subjects import Prompt, Subject
from blockskip.evaluation.fidelity import ceiling

Rows = Sequence[Sequence[Image.Image]]


def fidelity(rows: Rows, references: dict[str, list[Image.Image]], instruments: Instruments) -> dict[str, Any]:
    """The mean cosine of each picture with the references, by encoder and kind of reference.

    Args:
        rows: pictures by prompt and seed.
        references: ``real`` pictures that were kept back, and the same as the model could draw them (``drawable``).

    Returns:
        ``{encoder: {"real": [...], "drawable": [...]}}``, pictures in order.
    """
    flat = [image for row in rows for image in row]
    return {
        name: {kind: _means(encoder.embed(flat), encoder.embed(images)) for kind, images in references.items()}
        for name, encoder in instruments.encoders.items()
    }


def top(
    train: dict[str, list[Image.Image]], references: dict[str, list[Image.Image]], instruments: Instruments
) -> dict[str, Any]:
    """The ceiling of ``fidelity``: real pictures that were trained on against those that were kept back, by kind."""
    return {
        name: {kind: ceiling(train[kind], references[kind], encoder) for kind in references}
        for name, encoder in instruments.encoders.items()
    }


def prompt_fidelity(rows: Rows, prompts: Sequence[Prompt], instruments: Instruments) -> list[float] | None:
    """The cosine of each picture with its prompt in ordinary words; None where nothing can compare them."""
    score = instruments.prompts
    if score is None or not all(score.knows(prompt.said) for prompt in prompts):
        return None
    images = [image for row in rows for image in row]
    return score.cosines(images, [prompt.said for row, prompt in zip(rows, prompts, strict=True) for _ in row])


def backgrounds(rows: Rows, prompts: Sequence[Prompt], instruments: Instruments) -> list[float] | None:
    """1 for each picture that shows the background of its prompt, else 0; pictures of prompts without one are left out.

    None where nothing can tell backgrounds, or no prompt has one.
    """
    pairs = [(image, prompt.background) for row, prompt in zip(rows, prompts, strict=True) for image in row]
    asked = [(image, phrase) for image, phrase in pairs if phrase is not None]
    if instruments.backgrounds is None or not asked:
        return None
    seen = instruments.backgrounds.background([image for image, _ in asked])
    return [float(found == phrase) for found, (_, phrase) in zip(seen, asked, strict=True)]


def real_pictures(subject: Subject, images: list[Image.Image], instruments: Instruments) -> dict[str, Any]:
    """Prompt fidelity and backgrounds of the kept-back pictures, each with what it shows: the ceiling of both."""
    score, prompts = instruments.prompts, None
    if score is not None and all(said is not None and score.knows(said) for said in subject.heldout_said):
        prompts = score.cosines(images, [str(said) for said in subject.heldout_said])
    shown = [Prompt("", "", phrase) for phrase in subject.heldout_backgrounds]
    return {"prompt": prompts, "background": backgrounds([[image] for image in images], shown, instruments)}


def drift(rows: Rows, before: Rows, instruments: Instruments) -> dict[str, list[float]]:
    """1 - cosine of each picture of another prompt with the one that the base draws of it, by encoder."""
    flat, base = ([image for row in some for image in row] for some in (rows, before))
    return {
        name: [float(value) for value in 1 - (encoder.embed(flat).double() * encoder.embed(base).double()).sum(1)]
        for name, encoder in instruments.encoders.items()
    }


def _means(images: torch.Tensor, references: torch.Tensor) -> list[float]:
    return [float(value) for value in (images.double() @ references.double().T).mean(1)]
