"""The model whose blocks are looked into: where it is, and how it is run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from blockskip.adapters.frozen import FrozenAdapters
from blockskip.errors import UserError
from blockskip.loading.source import ModelSource, open_model
from blockskip.loading.transformer import empty_transformer
from blockskip.loading.weights import Weights
from blockskip.precision import DTYPES, resolve_device, resolve_dtype
from blockskip.preview.draw import Drawing
from blockskip.selection.request import Request


@dataclass(frozen=True)
class Model:
    """A source with everything resolved that ``Request`` leaves open.

    Args:
        blocks: how many blocks each of the transformer's lists has.
        size: (width, height) in pixels of what is drawn.
        identity: hashes of its weights.
    """

    request: Request
    source: ModelSource
    blocks: tuple[int, ...]
    names: tuple[str, ...]
    size: tuple[int, int]
    device: torch.device
    dtype: torch.dtype
    identity: tuple[str, ...]

    @property
    def num_blocks(self) -> int:
        """L."""
        return sum(self.blocks)

    @property
    def seeds(self) -> tuple[int, ...]:
        """Of the noise of each prompt's pictures."""
        return tuple(self.request.seed + number for number in range(self.request.images_per_prompt))

    def adapters(self, path: Path) -> FrozenAdapters:
        """A LoRA file of the model.

        Raises:
            UserError: it is no LoRA, or not of this model.
        """
        found = FrozenAdapters([str(path)], key="--loras")
        found.check(empty_transformer(self.source), "--loras")
        return found


def open_for(request: Request) -> Model:
    """The request's model; no weights are read but for their identity.

    Raises:
        UserError: it cannot be used, or not on this machine.
    """
    problems = request.check()
    if request.dtype != "auto" and request.dtype not in DTYPES:
        problems.append(f'--dtype "{request.dtype}" is not one of auto, {", ".join(DTYPES)}.')
    if problems:
        raise UserError(problems)
    device = resolve_device(request.device, "--device")
    source = open_model(request.model, request.revision)
    empty, layout = empty_transformer(source), source.family.layout
    height, width = Drawing((), height=request.height, width=request.width).size(source, "--")
    parts = ("transformer", "vae", *(encoder for _, encoder in source.text_parts))
    identity = tuple(Weights(source.part_folder(part)).identity() for part in parts)
    return Model(
        request, source, layout.counts(empty), tuple(layout.names(empty)), (width, height), device,
        resolve_dtype(request.dtype, device), identity,
    )  # fmt: skip
