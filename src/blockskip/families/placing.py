"""Positions of a patch in its picture, and of each sample's own in models that take one set of them for a batch.

    forward      ids (tokens, axes) of the batch      ids (tokens, B * axes): those of each sample side by side
    pos_embed    angles (tokens, D)                   angles (tokens, B, D)
    attention    of the batch                         of one sample after the other, each with its own angles

Where a batch has one set of ids, and for a batch of one sample, everything is the model's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from diffusers.models.transformers.transformer_bria import BriaAttnProcessor
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from diffusers.models.transformers.transformer_flux2 import Flux2AttnProcessor, Flux2ParallelSelfAttnProcessor
from diffusers.models.transformers.transformer_longcat_image import LongCatImageAttnProcessor
from diffusers.models.transformers.transformer_ovis_image import OvisImageAttnProcessor
from torch import nn

#: Cosines and sines of the angles.
Rotary = tuple[torch.Tensor, torch.Tensor]


def side_by_side(inputs: Mapping[str, Any], positions: torch.Tensor) -> dict[str, Any]:
    """``img_ids`` and ``txt_ids`` of a batch whose samples have positions of their own, as ``OwnPositions`` takes them.

    Args:
        inputs: arguments of ``forward`` with the ids that are common to a batch.
        positions: (B, tokens, 2), rows and columns; they become axes 1 and 2, counted from the first token's ids.
    """
    batch, tokens = positions.shape[:2]
    ids = inputs["img_ids"][:1].repeat(tokens, batch, 1)
    ids[..., 1:3] += positions.transpose(0, 1)
    return {"img_ids": ids.flatten(1), "txt_ids": inputs["txt_ids"].repeat(1, batch)}


def take_own_positions(model: Any) -> None:
    """Let a transformer take ids of each sample's own; with ids of a batch, or of one sample, nothing differs."""
    model.pos_embed = OwnPositions(model.pos_embed)
    for module in model.modules():
        own = _OWN.get(type(getattr(module, "processor", None)))
        if own is not None:
            module.set_processor(own())


class OwnPositions(nn.Module):
    """A model's own angles, of each sample's ids.

    Args:
        pos_embed: gives two tensors (tokens, D) of ids (tokens, axes).
    """

    def __init__(self, pos_embed: Any) -> None:
        super().__init__()
        self.pos_embed = pos_embed

    def forward(self, ids: torch.Tensor) -> Rotary:
        """Two tensors (tokens, D) of ids (tokens, axes), (tokens, B, D) of ids (tokens, B * axes)."""
        each = [self.pos_embed(own) for own in torch.split(ids, len(self.pos_embed.axes_dim), dim=1)]
        if len(each) == 1:
            only: Rotary = each[0]
            return only
        cos, sin = (torch.stack(values, dim=1) for values in zip(*each, strict=True))
        return cos, sin


def one_by_one(own: Callable[..., Any], streams: tuple[torch.Tensor | None, ...], rotary: Rotary | None) -> Any:
    """What ``own`` returns for each sample with its own angles, as a batch; of the whole batch where they share them.

    Args:
        own: takes the streams and angles of (tokens, D).
        streams: each (B, ...), or None.
        rotary: (tokens, D), or (tokens, B, D).
    """
    if rotary is None or rotary[0].ndim == 2:
        return own(*streams, rotary)
    each = []
    for sample in range(rotary[0].shape[1]):
        part = (None if stream is None else stream[sample : sample + 1] for stream in streams)
        each.append(own(*part, (rotary[0][:, sample], rotary[1][:, sample])))
    if isinstance(each[0], tuple):
        return tuple(torch.cat(values) for values in zip(*each, strict=True))
    return torch.cat(each)


class _TwoStreams:
    """Over a processor of diffusers for an image and a text stream."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        """The image tokens (B, tokens, D), and the text tokens where there are any."""
        streams = (hidden_states, encoder_hidden_states, attention_mask)
        own: Any = super()
        return one_by_one(functools.partial(own.__call__, attn), streams, image_rotary_emb)


class OwnFlux(_TwoStreams, FluxAttnProcessor):
    """The attention of FLUX.1 and Chroma."""


class OwnLongCatImage(_TwoStreams, LongCatImageAttnProcessor):
    """The attention of LongCat-Image."""


class OwnOvisImage(_TwoStreams, OvisImageAttnProcessor):
    """The attention of Ovis-Image."""


class OwnBria(_TwoStreams, BriaAttnProcessor):
    """The attention of Bria."""


class OwnFlux2(_TwoStreams, Flux2AttnProcessor):
    """The attention of FLUX.2's two streams."""


class OwnFlux2Joint(Flux2ParallelSelfAttnProcessor):
    """The attention of FLUX.2's joint stream."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        """All tokens (B, tokens, D)."""
        streams = (hidden_states, attention_mask)
        return one_by_one(functools.partial(super().__call__, attn), streams, image_rotary_emb)


_OWN: dict[type, Callable[[], Any]] = {
    FluxAttnProcessor: OwnFlux, Flux2AttnProcessor: OwnFlux2, Flux2ParallelSelfAttnProcessor: OwnFlux2Joint,
    LongCatImageAttnProcessor: OwnLongCatImage, OvisImageAttnProcessor: OwnOvisImage, BriaAttnProcessor: OwnBria,
}  # fmt: skip
