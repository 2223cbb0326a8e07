"""Hiding the text from the image in chosen blocks: the probe of Algorithm 1 (Eq. 2), and how much text an image reads.

                 text keys | image keys
    text queries     x     |     x          both are seen, as always
    image queries    .     |     x          hidden in the chosen blocks, for the chosen rows of a batch

Two calls give the masked attention without a mask of queries by keys: text queries on all keys, image queries on image
keys. Where blocks read the text by cross-attention, nothing is left of it: its output is zero, the last layer's bias
too. (An all-zero mask of text would hide nothing: it adds the same number to every score, and softmax cancels that.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch
from torch import nn

from blockskip.method.attention import Attention, BlockAttention
from blockskip.method.layout import BlockLayout

#: Numbers of blocks, for every row of the batch; or by number the rows in which the text is hidden there, bool (B,).
Blocks = Collection[int] | Mapping[int, torch.Tensor]

#: Most attention probabilities, in float32, that are in memory at a time while they are summed.
MOST_SCORES = 2**24


@contextmanager
def hidden_text(model: nn.Module, layout: BlockLayout, blocks: Blocks) -> Iterator[dict[int, int]]:
    """Hide the text from the image tokens in chosen blocks; text tokens still read everything.

    It costs a few hooks: to hide another set, open it anew. Gradients are those of the masked model if it stays open
    until ``backward`` has ended (gradient checkpointing runs blocks again).

    Args:
        model: the transformer.
        layout: where its blocks are and how they read the text.
        blocks: the chosen ones, 0..L-1. Of a mapping only the keys are fixed: its rows are read in every run of a
            block, so they may differ from batch to batch; best on the CPU. Rows that are False, or none at all, get
            plain attention.

    Yields:
        By block, how often it has run.

    Raises:
        ValueError: there is no such block; rows are not bool (B,), or not as many as the batch has.
        AttentionNotSeen: there was nothing to hide in a chosen block, since its attention was not seen.
    """
    hiding = _Hiding(model, layout, blocks)
    with hiding.watched():
        yield hiding.runs


class _Hiding(BlockAttention):
    """Attention without text keys for image queries."""

    def __init__(self, model: nn.Module, layout: BlockLayout, blocks: Blocks) -> None:
        super().__init__(model, layout, blocks)
        self._blocks, self._cross = blocks, layout.cross is not None

    def attend(self, index: int, attention: Attention) -> torch.Tensor:
        """The masked attention; as it is where nothing is hidden, or the whole module's output is to be zero."""
        rows = self._rows(index, attention.query)
        return attention.attend() if rows is False or self._cross else without_text(attention, rows)

    def leave(self, index: int, output: torch.Tensor) -> torch.Tensor:
        """Zero in the chosen rows."""
        rows = self._rows(index, output)
        if rows is None:
            return torch.zeros_like(output)
        if rows is False:
            return output
        return output.masked_fill(rows.to(output.device).reshape(-1, *[1] * (output.ndim - 1)), 0)

    def _rows(self, index: int, batch: torch.Tensor) -> torch.Tensor | Literal[False] | None:
        """Where block ``index`` hides the text now: some rows, bool (B,), none (False) or all (None)."""
        if not isinstance(self._blocks, Mapping):
            return None
        rows = self._blocks[index]
        if rows.dtype != torch.bool or rows.ndim != 1:
            raise ValueError(f"rows of block {index} must be bool (B,), not {rows.dtype} {tuple(rows.shape)}.")
        if not rows.any():
            return False
        if len(rows) != batch.shape[0]:
            raise ValueError(f"block {index} has {len(rows)} rows to hide the text in or not, its batch {len(batch)}.")
        return None if rows.all() else rows


def without_text(attention: Attention, rows: torch.Tensor | None = None) -> torch.Tensor:
    """The output (B, heads, queries, D) of joint attention in which image queries see image keys only.

    Args:
        rows: bool (B,), where it is so; elsewhere everything is seen. None: everywhere.
    """
    if rows is not None:
        rows = rows.to(attention.query.device)
        whole, hidden = (~rows).nonzero().flatten(), rows.nonzero().flatten()
        output = torch.cat([attention.attend(rows=whole), _in_two_calls(attention, hidden)])
        return output[torch.cat([whole, hidden]).argsort()]
    return _in_two_calls(attention, None)


def _in_two_calls(attention: Attention, rows: torch.Tensor | None) -> torch.Tensor:
    text = attention.attend(queries=attention.text, rows=rows)
    image = attention.attend(queries=attention.image, keys=attention.image, rows=rows)
    return torch.cat([text, image] if attention.text.start == 0 else [image, text], dim=2)


@contextmanager
def text_attention(
    model: nn.Module, layout: BlockLayout, blocks: Collection[int], tokens: torch.Tensor | None = None
) -> Iterator[dict[int, list[torch.Tensor]]]:
    """Measure how much attention image tokens pay to the text in chosen blocks, for example to the subject's name.

    Nothing that the model computes changes. Not for blocks whose text is hidden meanwhile.

    Args:
        model: the transformer.
        layout: where its blocks are and how they read the text.
        blocks: the chosen ones, 0..L-1.
        tokens: bool (text tokens,) or (B, text tokens), those that count; None counts all text.

    Yields:
        By block, for each run of it, the sum of the attention probabilities on these tokens, mean over image tokens and
        heads: float32 (B,) on the CPU, in [0, 1].

    Raises:
        ValueError: there is no such block; tokens are not bool, or not as many as the text has; or none are given where
            the image attends to nothing but text, so that the sum is always one.
        AttentionNotSeen: a chosen block has no such attention.
    """
    if tokens is None and layout.cross is not None:
        raise ValueError("cross-attention sees nothing but text: say which of its tokens count.")
    if tokens is not None and tokens.dtype != torch.bool:
        raise ValueError(f"tokens must be bool, not {tokens.dtype}.")
    measuring = _Measuring(model, layout, blocks, tokens)
    with measuring.watched():
        yield measuring.found


class _Measuring(BlockAttention):
    """Attention as it is, with its mass on text tokens written down."""

    def __init__(
        self, model: nn.Module, layout: BlockLayout, blocks: Collection[int], tokens: torch.Tensor | None
    ) -> None:
        super().__init__(model, layout, blocks)
        self.found: dict[int, list[torch.Tensor]] = {index: [] for index in self.runs}
        self._tokens_that_count = tokens

    def attend(self, index: int, attention: Attention) -> torch.Tensor:
        """The call's own output."""
        self.found[index].append(text_mass(attention, self._tokens_that_count).cpu())
        return attention.attend()


def text_mass(attention: Attention, tokens: torch.Tensor | None = None, most_scores: int = MOST_SCORES) -> torch.Tensor:
    """Mean over heads and image queries of the probability on text keys, float32 (B,).

    Args:
        tokens: bool (text tokens,) or (B, text tokens), those that count; None counts all.
        most_scores: float32 numbers that are computed at a time; queries go in as many parts as that takes.
    """
    query, key = attention.query[:, :, attention.image], attention.key
    text_tokens = len(range(*attention.text.indices(key.shape[2])))
    if tokens is not None and tokens.shape not in ((text_tokens,), (query.shape[0], text_tokens)):
        raise ValueError(f"tokens {tuple(tokens.shape)} do not fit the text ({query.shape[0]}, {text_tokens}).")
    batch, heads, queries, width = query.shape
    scale = attention.options.get("scale") or width**-0.5
    step = max(1, most_scores // (batch * heads * key.shape[2]))
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        keys = key.float().repeat_interleave(heads // key.shape[1], dim=1).transpose(-1, -2)
        counted = None if tokens is None else tokens.to(query.device).float().reshape(-1, 1, 1, text_tokens)
        mass = torch.zeros(batch, device=query.device)
        for start in range(attention.image.start, attention.image.stop, step):
            part = slice(start, min(start + step, attention.image.stop))
            scores = attention.query[:, :, part].float() @ keys * scale
            mask = attention.mask_of(queries=part)
            if mask is not None:
                scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
            probabilities = scores.softmax(-1)[..., attention.text]
            mass += (probabilities if counted is None else probabilities * counted).sum((1, 2, 3))
    return mass / (heads * queries)
