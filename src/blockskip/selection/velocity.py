"""The cheap probe: how much hiding the text in a set of blocks changes the predicted velocity. Nothing is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from blockskip.adapters.frozen import FrozenAdapters
from blockskip.data.pictures import find_pictures
from blockskip.errors import RunError
from blockskip.evaluation.intervals import Values
from blockskip.families import Text
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
from blockskip.selection.words import caption_tokens, subject_tokens, subject_words

#: Noise levels of the probe.
SIGMAS = (0.1, 0.3, 0.5, 0.7, 0.9)


@dataclass(frozen=True)
class ProbeArgument:
    """What the change of velocity and the attention, both measured with one adapter, depend on alike."""

    family: str
    model: tuple[str, ...]
    tokenizers: tuple[str, ...]
    text_length: int
    adapter: tuple[str, ...]
    pictures: tuple[str, ...]
    caption: str
    size: tuple[int, int]
    sigmas: tuple[float, ...]
    seed: int
    guidance: float
    dtype: str


@dataclass(frozen=True)
class VelocityArgument:
    """Everything that the changes of velocity depend on; ``sets``: the blocks that are masked together."""

    probe: ProbeArgument
    sets: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class AttentionArgument:
    """Everything that the attention depends on; ``tokens``: those that are counted, none: the caption's."""

    probe: ProbeArgument
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Velocities:
    """What the probe found.

    Args:
        distances: (adapters, pictures, sigmas, sets): |v_masked - v| / |v|, norms over a whole picture.
        attention: (adapters, pictures, sigmas, blocks): attention probability of image tokens on the text tokens that
            count, mean over heads and image tokens.
        words: of each adapter, the subject whose tokens count. Empty where one is not found: for all adapters it is
            then all text, or, where image tokens attend to nothing but text, all of the caption.
    """

    distances: Values
    attention: Values
    words: tuple[str, ...]

    def by_picture(self) -> Values:
        """(adapters, pictures, sets): the mean over noise levels, which are chosen, and not drawn as pictures are."""
        found: Values = self.distances.mean(2)
        return found


def velocity_distances(model: Model, tuned: Sequence[Tuned], sets: Sequence[Masked], table: Table) -> Velocities:
    """The change of velocity on the training pictures, with the adapter that was trained on them.

    Args:
        sets: the first one masks nothing.
        tuned: each with a folder of pictures; as many are used of each as the one with the fewest has.
        table: what is in it already is not computed again.

    Raises:
        RunError: the model gave values that are not finite.
    """
    folders = [_pictures(one) for one in tuned]
    count = min(len(paths) for paths in folders)
    length = model.source.text_length
    counted = [subject_tokens(model.source, one.subject.caption, length) for one in tuned]
    named = [tokens for tokens in counted if tokens is not None]
    words = tuple(subject_words(one.subject.caption) or "" for one in tuned) if len(named) == len(tuned) else ()
    chosen: list[torch.Tensor | None] = [*named] if words else [None] * len(tuned)
    keys = [_keys(model, *each, sets) for each in zip(tuned, [paths[:count] for paths in folders], chosen, strict=True)]
    shape, shape_of_masses = (count, len(SIGMAS), len(sets)), (count, len(SIGMAS), model.num_blocks)
    done = {velocity for velocity, _ in keys if table.numbers(velocity, shape) is not None}
    start = sum(velocity in done for velocity, _ in keys)
    found: list[list[list[list[float]]]] = []
    attention: list[list[list[list[float]]]] = []
    with progress(len(tuned) * len(SIGMAS), "masked velocities", start * len(SIGMAS)) as bar:
        for one, paths, tokens, (velocity, mass) in zip(tuned, folders, chosen, keys, strict=True):
            changes, masses = table.numbers(velocity, shape), table.numbers(mass, shape_of_masses)
            repeated = changes is not None and velocity not in done  # the same adapter, earlier in this list
            if changes is None or masses is None:
                samples = fixed_samples(
                    model.source, paths[:count], [one.subject.caption] * count, model.size, model.dtype, model.device,
                    seed=model.request.seed, stream=model.request.stream,
                )  # fmt: skip
                probe = _Probe(model, model.adapters(one.adapter), samples)
                if changes is None:
                    changes = _finite(probe.changes(sets, bar), model, one)
                    table.add(velocity, changes)
                if masses is None:
                    masses = _finite(probe.attention(tokens), model, one)
                    table.add(mass, masses)
                del probe, samples
                release()
            if repeated:
                bar.advance(len(SIGMAS))
            found.append(changes)
            attention.append(masses)
    return Velocities(np.asarray(found, dtype=np.float64), np.asarray(attention, dtype=np.float64), words)


def _pictures(one: Tuned) -> list[Path]:
    assert one.subject.images is not None
    return find_pictures(one.subject.images)


def _keys(
    model: Model, one: Tuned, paths: Sequence[Path], tokens: torch.Tensor | None, sets: Sequence[Masked]
) -> tuple[str, str]:
    """Of the changes of velocity, and of the attention to these tokens."""
    source, caption = model.source, one.subject.caption
    shared = ProbeArgument(
        source.family.name, model.identity, model.tokenizers, source.text_length,
        model.adapters(one.adapter).identity(), tuple(file_sha256(path) for path in paths), caption, model.size,
        SIGMAS, model.request.seed, source.family.defaults.guidance_scale, model.arithmetic,
    )  # fmt: skip
    places = () if tokens is None else tuple(tokens.nonzero().flatten().tolist())
    velocity = VelocityArgument(shared, tuple(item.blocks for item in sets))
    return key("selection", velocity), key("selection", AttentionArgument(shared, places))


def _finite(values: list[list[list[float]]], model: Model, one: Tuned) -> list[list[list[float]]]:
    if not np.isfinite(np.asarray(values)).all():
        raise RunError(
            f'The model gave values that are not finite in {model.dtype} with "{one.adapter}"; give another --dtype, '
            "or an adapter that was trained with a lower learning rate."
        )
    return values


class _Probe:
    """One tuned model and its pictures."""

    def __init__(self, model: Model, adapters: FrozenAdapters, samples: FixedSamples) -> None:
        source, self._samples = model.source, samples
        self._dtype, self._device, self._batch = model.dtype, model.device, model.request.batch_size
        self._num_blocks, self._family, self._config = model.num_blocks, source.family, source.config("transformer")
        self._guidance = source.family.defaults.guidance_scale
        self._transformer = (StreamedTransformer(source, model.dtype, model.device, adapters) if model.request.stream
                             else load_transformer(source, [], model.dtype, model.device, adapters))  # fmt: skip

    def changes(self, sets: Sequence[Masked], bar: Progress) -> list[list[list[float]]]:
        """(pictures, sigmas, sets)."""
        rows = [(picture, item) for picture in range(len(self._samples)) for item in sets]
        batches = [rows[start : start + self._batch] for start in range(0, len(rows), self._batch)]
        hidden = [[item.blocks for _, item in batch] for batch in batches]
        predict = HiddenPredictor(self._transformer, self._family, self._config, self._guidance, hidden)
        found = []
        for sigma in SIGMAS:
            with torch.no_grad(), compute(self._device, self._dtype):
                calls = [self._call([picture for picture, _ in batch], sigma) for batch in batches]
                together = torch.cat([one.float().cpu() for one in predict(calls)]).flatten(1)
            by_picture = together.unflatten(0, (len(self._samples), len(sets)))
            whole = by_picture[:, :1]
            found.append(((by_picture - whole).norm(dim=2) / whole.norm(dim=2)).tolist())
            bar.advance()
        return np.asarray(found).transpose(1, 0, 2).tolist()  # type: ignore[no-any-return]

    def attention(self, tokens: torch.Tensor | None) -> list[list[list[float]]]:
        """(pictures, sigmas, blocks).

        Args:
            tokens: bool, the first text tokens; those after them do not count. None: all text, or all of the caption.
        """
        layout, everything = self._family.layout, range(len(self._samples))
        predict = Predictor(self._transformer, self._family, self._config, self._guidance)
        module = self._transformer if isinstance(self._transformer, nn.Module) else self._transformer.model
        if tokens is None and layout.cross is not None:
            tokens = caption_tokens(self._samples)
        found = []
        for sigma in SIGMAS:
            with torch.no_grad(), compute(self._device, self._dtype):
                calls = [self._call(everything[start : start + self._batch], sigma)
                         for start in range(0, len(everything), self._batch)]  # fmt: skip
                whole = None if tokens is None else F.pad(tokens, (0, self._text_tokens(calls[0]) - len(tokens)))
                with text_attention(module, layout, range(self._num_blocks), whole) as mass:
                    predict(calls)
            found.append([torch.cat(mass[block]).tolist() for block in range(self._num_blocks)])
        return np.asarray(found).transpose(2, 0, 1).tolist()  # type: ignore[no-any-return]

    def _call(self, pictures: Sequence[int], sigma: float) -> tuple[torch.Tensor, torch.Tensor, Text]:
        return self._samples.call(pictures, sigma, self._dtype, self._device)

    def _text_tokens(self, call: tuple[torch.Tensor, torch.Tensor, Text]) -> int:
        """Text tokens in the transformer's attention."""
        count = self._family.layout.joint_text(self._family.forward_inputs(self._config, *call, self._guidance))
        assert count is not None
        return count
