"""Blocks that are planted to read no text, for tests that find those that do."""

from typing import Any

import torch
from torch import nn

from blockskip.method.layout import BlockLayout


def cut_text(block: nn.Module, layout: BlockLayout) -> None:
    """Let a block add nothing that it attends to to its image stream."""
    block = getattr(block, "block", block)
    names = (layout.cross,) if layout.cross else ("attn", "attn1", "attention")
    attention: Any = next(getattr(block, name) for name in names if hasattr(block, name))
    out = getattr(attention, "to_out", None)
    with torch.no_grad():
        if isinstance(out, nn.ModuleList):
            for parameter in out[0].parameters():
                parameter.zero_()
        else:  # single blocks of FLUX, FLUX.2 and Chroma: one layer for attention and feed-forward
            both: Any = block.proj_out if out is None else out
            both.weight[:, : attention.inner_dim].zero_()
