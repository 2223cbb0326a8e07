"""Eq. 2 by pictures: each drawn with the text hidden in a set of blocks, and compared with the one that saw it all."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from blockskip.adapters.frozen import FrozenAdapters
from blockskip.encoding.text import encode_prompts
from blockskip.evaluation.encoder import Encoder
from blockskip.evaluation.intervals import Values
from blockskip.keys import key
from blockskip.method.selection import Masked
from blockskip.preview.draw import Drawing, draw
from blockskip.progress import progress
from blockskip.run.previews import save_png
from blockskip.selection.model import Model
from blockskip.selection.subjects import Tuned
from blockskip.selection.table import Table


@dataclass(frozen=True)
class PicturesArgument:
    """Everything that the distances of one prompt depend on."""

    model: tuple[str, ...]
    adapter: tuple[str, ...]
    prompt: str
    seeds: tuple[int, ...]
    sets: tuple[tuple[int, ...], ...]
    size: tuple[int, int]
    steps: int | None
    guidance_scale: float | None
    dtype: str
    encoder: str


def picture_distances(
    model: Model, tuned: Sequence[Tuned], sets: Sequence[Masked], encoder: Encoder, table: Table, folder: Path
) -> Values:
    """D = 1 - cosine of the encoder's features between the masked and the unmasked picture of one prompt and seed.

    Args:
        sets: the first one masks nothing.
        table: what is in it already is not drawn again.
        folder: the pictures of each adapter's first prompt and seed are kept there, ``<subject>-<set>.png``.

    Returns:
        (adapters, prompts * seeds, sets), float64.
    """
    request = model.request
    found = []
    with progress(sum(len(one.subject.prompts) for one in tuned), "masked pictures") as bar:
        for one in tuned:
            adapters = model.adapters(one.adapter)
            rows: list[list[float]] = []
            for number, prompt in enumerate(one.subject.prompts):
                argument = PicturesArgument(
                    model.identity, adapters.identity(), prompt, model.seeds, tuple(item.blocks for item in sets),
                    model.size, request.steps, request.guidance_scale, str(model.dtype), encoder_name(encoder),
                )  # fmt: skip
                name = key("selection", argument)
                values = table.get(name)
                if values is None:
                    pictures = _draw(model, adapters, prompt, sets)
                    values = [_distances(line, encoder) for line in pictures]
                    if number == 0:
                        _keep(folder, one.subject.name, sets, pictures[0])
                    table.add(name, values)
                rows += values
                bar.advance()
            found.append(rows)
    return np.asarray(found, dtype=np.float64)


def _draw(model: Model, adapters: FrozenAdapters, prompt: str, sets: Sequence[Masked]) -> list[list[Image.Image]]:
    """Pictures by seed and set."""
    request = model.request
    drawing = Drawing(
        (prompt,), model.seeds, model.size[1], model.size[0], request.steps, request.guidance_scale,
        None, request.stream, request.batch_size,
    )  # fmt: skip
    encode = functools.partial(encode_prompts, stream=request.stream)
    hidden = [item.blocks for item in sets]
    flat = draw(model.source, drawing, encode, model.dtype, model.device, adapters, hidden)[0]
    return [flat[start : start + len(sets)] for start in range(0, len(flat), len(sets))]


def _distances(pictures: list[Image.Image], encoder: Encoder) -> list[float]:
    features = encoder.embed(pictures).double()
    return [float(value) for value in 1 - features @ features[0]]


def _keep(folder: Path, name: str, sets: Sequence[Masked], pictures: Sequence[Image.Image]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for item, picture in zip(sets, pictures, strict=True):
        save_png(folder / f"{name}-{item.kind}-{item.number:02d}.png", picture)


def encoder_name(encoder: Encoder) -> str:
    """What the encoder calls itself, with its weights' hash where its name may stand for several."""
    return str(getattr(encoder, "identity", encoder.name))
