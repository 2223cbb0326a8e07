"""The few facts about a transformer that block skipping needs; each family fills in one BlockLayout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

#: The names under which a block's state is kept: the text stream, and the image stream or the joint one.
TEXT, IMAGE = "encoder_hidden_states", "hidden_states"
#: What a block may return, by name, in order.
Returns = tuple[str, ...]
#: What leaves a block, by name: ``{"hidden_states": (B, tokens, D), "encoder_hidden_states": (B, tokens, D)}``.
State = dict[str, torch.Tensor]


def given_text(inputs: Mapping[str, Any]) -> int | None:
    """How many text tokens a model is called with, from the keyword arguments of ``forward``."""
    text = inputs.get(TEXT)
    return text.shape[1] if isinstance(text, torch.Tensor) else None


@dataclass(frozen=True)
class BlockLayout:
    """Where a transformer keeps its blocks and what they return.

    Args:
        lists: attribute names of the block lists, in the order in which ``forward`` runs them; blocks count through all
            of them, 0..L-1.
        returns: names of what a block returns, in order; a mapping when the lists differ.
        head: attribute name of the module that receives the image tokens after the last block.
        order: where the image tokens stand in attention and in joint streams; None where they never meet the text.
        cross: attribute name, inside a block, of the module by which image tokens read the text where that is
            cross-attention; its output is added to the image stream. None where text and image attend jointly.
        joint_text: how many text tokens a joint stream has from the first block on, from the keyword arguments of
            ``forward``; the most where samples differ.
    """

    lists: tuple[str, ...]
    returns: Returns | Mapping[str, Returns]
    head: str = "norm_out"
    order: Literal["txt_img", "img_txt"] | None = None
    cross: str | None = None
    joint_text: Callable[[Mapping[str, Any]], int | None] = given_text

    def names(self, model: nn.Module) -> list[str]:
        """Full names of all blocks in forward order, for example ``single_transformer_blocks.3``."""
        return [f"{name}.{index}" for name in self.lists for index in range(len(getattr(model, name)))]

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The modules (blocks or stubs) that stand at ``names``."""
        return [block for name in self.lists for block in getattr(model, name)]

    def counts(self, model: nn.Module) -> tuple[int, ...]:
        """How many blocks each list has, in forward order."""
        return tuple(len(getattr(model, name)) for name in self.lists)

    def count(self, model: nn.Module) -> int:
        """L, the number of blocks."""
        return sum(self.counts(model))

    def replace(self, model: nn.Module, index: int, block: nn.Module) -> nn.Module:
        """Put a module in the place of block ``index`` and return what stood there."""
        name, _, position = self.names(model)[index].rpartition(".")
        blocks = getattr(model, name)
        old: nn.Module = blocks[int(position)]
        blocks[int(position)] = block
        return old

    def head_of(self, model: nn.Module) -> nn.Module:
        """The module that receives the image tokens after the last block."""
        head: nn.Module = getattr(model, self.head)
        return next(iter(head.values())) if isinstance(head, nn.ModuleDict) else head

    def returns_of(self, name: str) -> Returns:
        """Names of what the block of a full name returns."""
        if isinstance(self.returns, Mapping):
            return self.returns[name.partition(".")[0]]
        return self.returns

    def image_tokens(self, state: torch.Tensor, count: int) -> torch.Tensor:
        """The ``count`` image tokens of a stream (B, tokens, D): all of them, or the image's part of a joint stream."""
        if state.shape[1] == count:
            return state
        return state[:, -count:] if self.order == "txt_img" else state[:, :count]


def pack(returned: object, names: Returns) -> State:
    """The state a block returned, by name; a stream that the block ended (None) is left out."""
    values = returned if isinstance(returned, tuple) else (returned,)
    return {name: value for name, value in zip(names, values, strict=True) if isinstance(value, torch.Tensor)}


def unpack(state: Mapping[str, torch.Tensor | None], names: Returns) -> object:
    """What a block would have returned: the inverse of ``pack``."""
    values = tuple(state.get(name) for name in names)
    return values if len(values) > 1 else values[0]
