"""The model that is measured: where it is, and how it is run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from blockskip.adapters.frozen import FrozenAdapters
from blockskip.benchmark.request import Request, checked
from blockskip.loading.resolved import resolutions
from blockskip.loading.source import ModelSource, open_model
from blockskip.loading.transformer import empty_transformer
from blockskip.loading.weights import Weights
from blockskip.precision import resolve_device, resolve_dtype
from blockskip.preview.draw import Drawing
from blockskip.settings import from_flat


@dataclass(frozen=True)
class Model:
    """A source with everything resolved that ``Request`` leaves open.

    Args:
        num_blocks: L.
        size: (width, height) in pixels of what is drawn.
        full_resolution, resolution: pixels that settings train on.
        text_length: text tokens, of the trainings and of everything that is measured.
        identity: hashes of its weights.
    """

    request: Request
    source: ModelSource
    num_blocks: int
    size: tuple[int, int]
    full_resolution: int
    resolution: int
    text_length: int
    device: torch.device
    dtype: torch.dtype
    identity: tuple[str, ...]

    @property
    def loss_sizes(self) -> tuple[tuple[int, int], ...]:
        """(width, height) at which the held-out loss is taken: the full resolution, and what is drawn."""
        return tuple(dict.fromkeys([(self.full_resolution, self.full_resolution), self.size]))

    def drawing(self, prompts: tuple[str, ...], seeds: tuple[int, ...]) -> Drawing:
        """What is drawn of some prompts, as everything here is drawn."""
        request = self.request
        return Drawing(
            prompts, seeds, self.size[1], self.size[0], request.steps, request.guidance_scale, self.text_length,
            False, request.batch_size,
        )  # fmt: skip

    @property
    def base_adapters(self) -> tuple[str, ...]:
        """Files that belong to the base, in trainings and in everything that is drawn."""
        return tuple(self.request.training_of().get("model.base_adapters", ()))

    def adapters(self, learnt: Path | None = None) -> FrozenAdapters:
        """What acts beside the base's layers: its own adapters, and what was learnt."""
        return FrozenAdapters([*self.base_adapters, *([str(learnt)] if learnt is not None else [])])


def open_for(request: Request) -> Model:
    """The request's model; no weights are read but for their identity.

    Raises:
        UserError: it cannot be used, or not on this machine.
    """
    checked(request)
    device = resolve_device(request.device, "--device")
    source = open_model(request.model, request.revision, request.transformer)
    config = from_flat(dict(request.training_of()))
    full, resolution = resolutions(config, source)
    height, width = Drawing((), height=request.height, width=request.width, steps=request.steps).check(source, "--")
    parts = ("transformer", "vae", *(encoder for _, encoder in source.text_parts))
    identity = tuple(Weights(source.part_folder(part)).identity() for part in parts)
    return Model(
        request, source, source.family.layout.count(empty_transformer(source)), (width, height), full, resolution,
        config.data.text_length or source.text_length, device, resolve_dtype(request.dtype, device), identity,
    )  # fmt: skip
