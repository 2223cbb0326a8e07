"""The cheap probe: how much hiding the text in a set of blocks changes the predicted velocity. Nothing is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from blockskip.adapters.frozen import FrozenAdapters
from blockskip.data.pictures import find_pictures
from blockskip.evaluation.intervals import Values
from blockskip.keys import file_sha256, key
from blockskip.loading.transformer import StreamedTransformer, load_transformer
from blockskip.memory import release
from blockskip.method.masking import text_attention
from blockskip.method.selection import Masked
from blockskip.precision import compute
from blockskip.preview.denoise import Predictor
from blockskip.preview.hidden import HiddenPredictor
from blockskip.progress import Progress, progress
from blockskip.run.fixed import FixedSamples, fixed_samples
from blockskip.selection.model import Model
from blockskip.selection.subjects import Tuned
from blockskip.selection.table import Table

#: Noise levels of the probe.
SIGMAS = (0.1, 0.3, 0.5, 0.7, 0.9)


@dataclass(frozen=True)
class VelocityArgument:
    """Everything that the probe of one adapter depends on; ``sets`` empty: its attention to the text."""

    model: tuple[str, ...]
    adapter: tuple[str, ...]
    pictures: tuple[str, ...]
    caption: str
    size: tuple[int, int]
    sigmas: tuple[float, ...]
    sets: tuple[tuple[int, ...], ...]
    seed: int
    dtype: str


@dataclass(frozen=True)
class Velocities:
    """What the probe found.

    Args:
        distances: (adapters, pictures, sigmas, sets): |v_masked - v| / |v|, norms over a whole picture.
        attention: (adapters, sigmas, blocks): attention probability of image tokens on the text, where they also
            attend to each other, or on the caption's own tokens, where they attend to nothing but text; mean over
            pictures, heads and image tokens.
    """

    distances: Values
    attention: Values


def velocity_distances(model: Model, tuned: Sequence[Tuned], sets: Sequence[Masked], table: Table) -> Velocities:
    """The change of velocity on the training pictures, with the adapter that was trained on them.

    Args:
        sets: the first one masks nothing.
        tuned: each with a folder of pictures; as many are used of each as the one with the fewest has.
        table: what is in it already is not computed again.
    """
    folders = [find_pictures(one.subject.images) for one in tuned if one.subject.images is not None]
    count = min(len(paths) for paths in folders)
    found: list[list[list[list[float]]]] = []
    attention: list[list[list[float]]] = []
    with progress(len(tuned) * len(SIGMAS), "masked velocities") as bar:
        for one, paths in zip(tuned, folders, strict=True):
            adapters, used = model.adapters(one.adapter), paths[:count]
            argument = VelocityArgument(
                model.identity, adapters.identity(), tuple(file_sha256(path) for path in used), one.subject.caption,
                model.size, SIGMAS, tuple(item.blocks for item in sets), model.request.seed, str(model.dtype),
            )  # fmt: skip
            name = key("selection", argument)
            value = table.get(name)
            if value is None:
                samples = fixed_samples(
                    model.source, used, [one.subject.caption] * count, model.size, model.dtype, model.device,
                    seed=model.request.seed, stream=model.request.stream,
                )  # fmt: skip
                value = _measure(model, adapters, samples, sets, bar)
                table.add(name, value)
            else:
                bar.advance(len(SIGMAS))
            found.append(value["distances"])
            attention.append(value["attention"])
    return Velocities(np.asarray(found, dtype=np.float64), np.asarray(attention, dtype=np.float64))


def _measure(
    model: Model, adapters: FrozenAdapters, samples: FixedSamples, sets: Sequence[Masked], bar: Progress
) -> dict[str, list[list[list[float]]] | list[list[float]]]:
    source, dtype, device = model.source, model.dtype, model.device
    transformer = (StreamedTransformer(source, dtype, device, adapters) if model.request.stream
                   else load_transformer(source, [], dtype, device, adapters))  # fmt: skip
    config, guidance = source.config("transformer"), source.family.defaults.guidance_scale
    rows = [(picture, item) for picture in range(len(samples)) for item in sets]
    size = model.request.batch_size
    batches = [rows[start : start + size] for start in range(0, len(rows), size)]
    hidden = [[item.blocks for _, item in batch] for batch in batches]
    predict = HiddenPredictor(transformer, source.family, config, guidance, hidden)
    plain = Predictor(transformer, source.family, config, guidance)
    module = transformer if isinstance(transformer, nn.Module) else transformer.model
    counted = subject_tokens(samples) if source.family.layout.cross is not None else None
    changes, masses = [], []
    for sigma in SIGMAS:
        with torch.no_grad(), compute(device, dtype):
            calls = [samples.call([picture for picture, _ in batch], sigma, dtype, device) for batch in batches]
            together = torch.cat([one.float().cpu() for one in predict(calls)]).flatten(1)
            with text_attention(module, source.family.layout, range(model.num_blocks), counted) as mass:
                plain([samples.call(range(len(samples)), sigma, dtype, device)])
        by_picture = together.unflatten(0, (len(samples), len(sets)))
        whole = by_picture[:, :1]
        changes.append(((by_picture - whole).norm(dim=2) / whole.norm(dim=2)).tolist())
        masses.append([float(torch.cat(mass[block]).mean()) for block in range(model.num_blocks)])
        bar.advance()
    del transformer, predict, plain, module
    release()
    distances = np.asarray(changes).transpose(1, 0, 2).tolist()
    return {"distances": distances, "attention": masses}


def subject_tokens(samples: FixedSamples) -> torch.Tensor:
    """bool (N, tokens): the text tokens that are the caption's own, not padding and not those of the empty caption."""
    name = next(name for name, value in samples.empty.items() if value.ndim == 3)
    mask = next((value for key, value in samples.empty.items() if key.endswith("mask")), None)
    found = []
    for text in samples.texts:
        differs = (text[name] != samples.empty[name]).any(-1)[0]
        own = next((value for key, value in text.items() if key.endswith("mask")), None)
        found.append(differs if own is None or mask is None else differs & own[0].bool())
    return torch.stack(found)
