"""The model whose blocks are looked into: where it is, and how it is run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from blockskip.adapters.frozen import FrozenAdapters
from blockskip.errors import UserError
from blockskip.loading.source import ModelSource, open_model
from blockskip.loading.transformer import empty_transformer
from blockskip.loading.weights import Weights, files_identity
from blockskip.precision import DTYPES, resolve_device, resolve_dtype
from blockskip.preview.draw import Drawing
from blockskip.selection.request import Request


@dataclass(frozen=True)
class Sampling:
    """How noise becomes a picture, with everything filled in that the request leaves to the model.

    Args:
        scheduler: hash of its files.
        steps: sampler steps.
        guidance_input, guidance_scale: of the transformer, and of classifier-free guidance.
        negative_prompt: None where there is no classifier-free guidance.
    """

    scheduler: str
    steps: int
    guidance_input: float
    guidance_scale: float
    negative_prompt: str | None


@dataclass(frozen=True)
class Model:
    """A source with everything resolved that ``Request`` leaves open.

    Args:
        blocks: how many blocks each of the transformer's lists has.
        size: (width, height) in pixels of what is drawn.
        identity: hashes of its weights.
        tokenizers: hashes of their files.
        sampling: how its pictures are drawn.
    """

    request: Request
    source: ModelSource
    blocks: tuple[int, ...]
    names: tuple[str, ...]
    size: tuple[int, int]
    device: torch.device
    dtype: torch.dtype
    identity: tuple[str, ...]
    tokenizers: tuple[str, ...]
    sampling: Sampling

    @property
    def num_blocks(self) -> int:
        """L."""
        return sum(self.blocks)

    @property
    def arithmetic(self) -> str:
        """In what the model computes, and where; the bits of a picture or a velocity depend on both."""
        return f"{self.dtype} on {self.device.type}"

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
    source = open_model(request.model, request.revision, request.transformer)
    empty, layout = empty_transformer(source), source.family.layout
    height, width = Drawing((), height=request.height, width=request.width, steps=request.steps).check(source, "--")
    parts = ("transformer", "vae", *(encoder for _, encoder in source.text_parts))
    identity = tuple(Weights(source.part_folder(part)).identity() for part in parts)
    tokenizers = tuple(files_identity(source.part_folder(part)) for part, _ in source.text_parts)
    return Model(
        request, source, layout.counts(empty), tuple(layout.names(empty)), (width, height), device,
        resolve_dtype(request.dtype, device), identity, tokenizers, _sampling(request, source),
    )  # fmt: skip


def _sampling(request: Request, source: ModelSource) -> Sampling:
    family, call = source.family, source.settings.get("call", {})
    embedded, scale = family.preview_guidance(source.config("transformer"), call, request.guidance_scale)
    negative = call.get("negative_prompt", family.defaults.negative_prompt) if scale > 1 else None
    steps = Drawing((), steps=request.steps).sampler_steps(source)
    return Sampling(files_identity(source.part_folder("scheduler")), steps, embedded, scale, negative)
