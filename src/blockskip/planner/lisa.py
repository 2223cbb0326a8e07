"""What LISA trains in a run: its blocks are a pure function of the seed, so that a plan knows them before the run."""

from __future__ import annotations

from blockskip.loading.transformer import empty_transformer
from blockskip.planner.setting import Setting
from blockskip.training.lisa import blocks_until


def periods(setting: Setting) -> list[tuple[int, ...]]:
    """The blocks of every period of a run; empty where it trains LoRA."""
    train = setting.config.train
    if not train.lisa_blocks:
        return []
    return blocks_until(train.seed, train.steps, train.lisa_period, setting.num_blocks, train.lisa_blocks)


def hardest_steps(setting: Setting) -> tuple[int, ...]:
    """The first optimiser steps of the periods that may take most memory: of most weights, and of the earliest block.

    A gradient keeps the activations of everything behind its block. (0,) where the run trains LoRA.
    """
    drawn, sizes = periods(setting), block_sizes(setting)
    pairs = [(sum(sizes[index] for index in blocks), -blocks[0]) for blocks in drawn]
    weights = max(range(len(pairs)), key=pairs.__getitem__, default=0)
    earliest = max(range(len(pairs)), key=lambda number: pairs[number][::-1], default=0)
    return tuple(setting.config.train.lisa_period * number for number in dict.fromkeys((weights, earliest)))


def changed_bytes(setting: Setting) -> int:
    """Bytes of the weights, float32, that a run has changed at its end; 0 where it trains LoRA."""
    sizes = block_sizes(setting) if setting.config.train.lisa_blocks else []
    return 4 * sum(sizes[index] for index in {index for one in periods(setting) for index in one})


def block_sizes(setting: Setting) -> list[int]:
    """How many values each block of the model has."""
    blocks = setting.source.family.layout.blocks(empty_transformer(setting.source))
    return [sum(value.numel() for value in block.parameters()) for block in blocks]
