"""Blocks of a transformer that are read from the file whenever they are run, ahead of their turn."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from blockskip.errors import UserError
from blockskip.loading.ahead import BackAndForth, BlockWeights, reading_ahead
from blockskip.loading.source import ModelSource
from blockskip.loading.transformer import Adapters, empty_transformer
from blockskip.loading.weights import Weights
from blockskip.method.streaming import install_streamed


def stream_blocks(
    model: nn.Module,
    source: ModelSource,
    indices: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    adapters: Adapters | None = None,
    *,
    read_ahead: bool = True,
) -> None:
    """Put streamed blocks, frozen and in eval mode, where stubs stand in a transformer.

    Args:
        indices: of the blocks, ascending.
        dtype: of their floating-point weights while they are in memory.
        adapters: frozen adapters to attach to their layers; these stay in memory.
        read_ahead: whether the next block is copied to a device of its own while one computes.

    Raises:
        UserError: the model's files lack a tensor of these blocks.
    """
    layout, weights = source.family.layout, Weights(source.part_folder("transformer"))
    names, empty = layout.names(model), layout.blocks(empty_transformer(source))
    blocks = {index: empty[index].to(dtype).requires_grad_(False).eval() for index in indices}
    for index, block in blocks.items():
        stored = set(weights.under(names[index]))
        for name in block.state_dict():
            if f"{names[index]}.{name}" not in stored:
                raise UserError(f'"{weights.folder}" lacks the tensor "{names[index]}.{name}"; fetch the model again.')
        if adapters is not None:
            adapters.attach(block, names[index], device)

    blocks_of = BlockWeights(weights, names, dtype, device)
    install_streamed(model, layout, blocks, reading_ahead(blocks_of, BackAndForth(indices), read_ahead))
