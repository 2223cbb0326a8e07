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
from blockskip.errors import RunError
from blockskip.evaluation.encoder import Encoder
from blockskip.evaluation.intervals import Values
from blockskip.keys import key
from blockskip.method.selection import Masked
from blockskip.preview.draw import Drawing, draw
from blockskip.progress import progress
from blockskip.run.previews import save_png
from blockskip.selection.model import Model, Sampling
from blockskip.selection.subjects import Tuned
from blockskip.selection.table import Table


@dataclass(frozen=True)
class PicturesArgument:
    """Everything that the distances of one prompt depend on."""

    family: str
    model: tuple[str, ...]
    tokenizers: tuple[str, ...]
    text_length: int
    adapter: tuple[str, ...]
    prompt: str
    seeds: tuple[int, ...]
    sets: tuple[tuple[int, ...], ...]
    size: tuple[int, int]
    sampling: Sampling
    dtype: str
    encoder: str


def picture_distances(
    model: Model, tuned: Sequence[Tuned], sets: Sequence[Masked], encoder: Encoder, table: Table, folder: Path
) -> Values:
    """D = 1 - cosine of the encoder's features between the masked and the unmasked picture of one prompt and seed.

    Args:
        sets: the first one masks nothing.
        table: what is in it already is not drawn again.
        folder: the pictures of each adapter's first prompt and seed are kept there, ``<kept name>-<set>.png``.

    Returns:
        (adapters, prompts * seeds, sets), float64.

    Raises:
        RunError: the encoder, or the autoencoder, gave values that are not finite.
    """
    found = []
    names, shape = [_keys(model, one, sets, encoder) for one in tuned], (len(model.seeds), len(sets))
    done = {name for row in names for name in row if table.numbers(name, shape) is not None}
    total, start = sum(len(row) for row in names), sum(name in done for row in names for name in row)
    with progress(total, "masked pictures", start) as bar:
        for one, row in zip(tuned, names, strict=True):
            rows: list[list[float]] = []
            for number, (prompt, name) in enumerate(zip(one.subject.prompts, row, strict=True)):
                values = table.numbers(name, shape)
                if values is None:
                    pictures = _draw(model, model.adapters(one.adapter), prompt, sets)
                    values = [_distances(line, encoder, prompt) for line in pictures]
                    if number == 0:
                        _keep(folder, _kept_name(one, name), sets, pictures[0])
                    table.add(name, values)
                rows += values
                if name not in done:
                    bar.advance()
            found.append(rows)
    return np.asarray(found, dtype=np.float64)


def kept_names(model: Model, tuned: Sequence[Tuned], sets: Sequence[Masked], encoder: Encoder) -> list[str]:
    """How the names of the kept pictures of each adapter begin: its subject, and what tells other settings apart."""
    return [_kept_name(one, _keys(model, one, sets, encoder)[0]) for one in tuned]


def _kept_name(one: Tuned, name: str) -> str:
    return f"{one.subject.name}-{name[:12]}"


def _keys(model: Model, one: Tuned, sets: Sequence[Masked], encoder: Encoder) -> list[str]:
    """Of the distances of each prompt."""
    adapter, hidden = model.adapters(one.adapter).identity(), tuple(item.blocks for item in sets)
    return [
        key("selection", PicturesArgument(
            model.source.family.name, model.identity, model.tokenizers, model.source.text_length, adapter, prompt,
            model.seeds, hidden, model.size, model.sampling, model.arithmetic, encoder_name(encoder),
        ))
        for prompt in one.subject.prompts
    ]  # fmt: skip


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


def _distances(pictures: list[Image.Image], encoder: Encoder, prompt: str) -> list[float]:
    features = encoder.embed(pictures).double()
    if not bool(features.isfinite().all()):
        raise RunError(
            f'The encoder {encoder_name(encoder)} gave values that are not finite for pictures of "{prompt}"; '
            "give another --encoder."
        )
    return [float(value) for value in 1 - features @ features[0]]


def _keep(folder: Path, name: str, sets: Sequence[Masked], pictures: Sequence[Image.Image]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for item, picture in zip(sets, pictures, strict=True):
        save_png(folder / f"{name}-{item.kind}-{item.number:02d}.png", picture)


def encoder_name(encoder: Encoder) -> str:
    """What the encoder calls itself, with its weights' hash where its name may stand for several."""
    return str(getattr(encoder, "identity", encoder.name))
