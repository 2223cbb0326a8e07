"""Blocks that visit memory: read for the forward pass, and read again for the backward pass; gradients are exact.

    forward     L-3 | L-2 | L-1                     one block's weights are in memory at a time;
    backward                  | L-1 | L-2 | L-3     what entered each block stays, as in gradient checkpointing

The third choice between skipping a block (Eq. 3: cheap, approximate) and keeping it (exact, in memory). A frozen tail
can be run so; and so can the trained middle, of which the LoRA stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from blockskip.method.layout import BlockLayout

#: Gives the tensors of a block by its number, named as inside the block (``attn.to_q.weight``), where they are used.
Read = Callable[[int], dict[str, torch.Tensor]]

#: What PEFT puts between a layer's name and its tensors where the layer takes LoRA.
BASE_LAYER = ".base_layer."


class StreamedBlock(nn.Module):
    """Stands in a block's place and reads the block's tensors for each run of it; nothing keeps them afterwards.

    Its submodules and parameters are the block's own, under the same names, so that PEFT can put LoRA on them and
    hooks can be set. With gradients on, it checkpoints itself: one read in the forward pass, one in the backward pass,
    also where the model checkpoints its blocks.

    Args:
        block: its parameters are on the meta device, except those that stay (LoRA).
        index: number of the block, for ``read``.
        read: asked for the block's tensors for every run; names that the block lacks are an error.
    """

    def __init__(self, block: nn.Module, index: int, read: Read) -> None:
        super().__init__()
        object.__setattr__(self, "_block", block)  # no submodule: its name would come before those of its parts
        self._modules, self._parameters, self._buffers = block._modules, block._parameters, block._buffers
        self._index, self._read = index, read
        self.train(block.training)

    def train(self, mode: bool = True) -> StreamedBlock:
        """Set the mode of the block too."""
        super().train(mode)
        cast(nn.Module, self._block).training = mode
        return self

    def forward(self, *args: Any, **kwargs: Any) -> object:
        """What the block returns."""
        if not torch.is_grad_enabled():
            return self._run(args, kwargs)
        # Keywords too go as a positional argument: only there ``checkpoint`` looks for the devices that draw dropout.
        return checkpoint(self._run, args, kwargs, use_reentrant=False)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        own = {name.replace(BASE_LAYER, "."): name for name in self.state_dict(keep_vars=True)}
        tensors = {own[name]: value for name, value in self._read(self._index).items()}
        return functional_call(cast(nn.Module, self._block), tensors, args, kwargs)


def install_streamed(model: nn.Module, layout: BlockLayout, blocks: Mapping[int, nn.Module], read: Read) -> None:
    """Put streamed blocks in the places of ``blocks`` (numbers, and blocks without memory)."""
    for index, block in blocks.items():
        layout.replace(model, index, StreamedBlock(block, index, read))
