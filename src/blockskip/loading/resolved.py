"""What a config leaves open, filled in from the model: resolutions, split, the family's defaults."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import nn

from blockskip import builtin
from blockskip.config import Config
from blockskip.errors import UserError
from blockskip.families import Family
from blockskip.loading.selected import selected_split
from blockskip.loading.source import ModelSource
from blockskip.method.split import Split
from blockskip.precision import resolve_dtype
from blockskip.presets import split_for


def resolutions(config: Config, source: ModelSource) -> tuple[int, int]:
    """(full resolution, training resolution) in pixels.

    Raises:
        UserError: the model has no positions for patches of that resolution.
    """
    stride, largest = source.pixel_stride, source.largest_side
    if largest is not None and (config.data.resolution or 0) > largest:
        raise UserError(f"data.resolution = {config.data.resolution} is more than this model takes; take {largest}.")
    full = config.data.full_resolution or max(source.full_resolution, config.data.resolution or 0)
    half = max(stride, full // 2 // stride * stride)
    return full, config.data.resolution or min(half, largest or half)


def resolved(config: Config, source: ModelSource, full: int, resolution: int, device: torch.device) -> Config:
    """The config with every default filled in that depends on the model or the device.

    Args:
        full, resolution: of ``resolutions``.
    """
    defaults = source.family.defaults
    data = dataclasses.replace(
        config.data, full_resolution=full, resolution=resolution,
        text_length=config.data.text_length or source.text_length,
    )  # fmt: skip
    sigma = dataclasses.replace(
        config.sigma, distribution=config.sigma.distribution or defaults.distribution,
        shift=config.sigma.shift if config.sigma.shift is not None else defaults.shift,
    )  # fmt: skip
    lora = dataclasses.replace(
        config.lora,
        lora_alpha=float(config.lora.rank if config.lora.lora_alpha is None else config.lora.lora_alpha),
    )
    guidance = config.train.guidance_scale
    train = dataclasses.replace(config.train, guidance_scale=defaults.guidance_scale if guidance is None else guidance)
    train = dataclasses.replace(train, device=str(device))
    dtype = str(resolve_dtype(config.model.dtype, device)).removeprefix("torch.")
    local = source.hub is None and config.model.path not in builtin.MODELS
    model = dataclasses.replace(
        config.model,
        dtype=dtype,
        path=str(source.folder.resolve()) if local else config.model.path,
        base_adapters=tuple(str(Path(path).expanduser().resolve()) for path in config.model.base_adapters),
    )
    return dataclasses.replace(config, model=model, data=data, sigma=sigma, lora=lora, train=train)


def conflicts(config: Config) -> list[str]:
    """Sentences about settings that no run can have, whatever its model and device."""
    found = []
    if config.model.dtype == "float16":
        found.append('model.dtype = "float16" is too narrow to train in; use "bfloat16" or "float32".')
    if config.train.stream_middle and config.model.quantization != "none":
        found.append(
            f'train.stream_middle reads the unquantised base and model.quantization = "{config.model.quantization}" '
            "keeps the quantised one; use one of the two."
        )
    if config.data.class_images and not config.data.class_prompt:
        found.append("data.class_images needs data.class_prompt, the caption of the class pictures.")
    return found


def stored_split(config: Config, split: Split) -> Split:
    """The part of a split that stored features stand in for: a streamed tail is run, and needs none."""
    return Split(split.front, 0) if config.skip.tail_mode == "stream" else split


def streamed_blocks(config: Config, split: Split, num_blocks: int) -> range:
    """The numbers of the blocks that are read for each run of them while training."""
    middle = split.middle(num_blocks)
    tail = num_blocks if config.skip.tail_mode == "stream" else middle.stop
    return range(middle.start if config.train.stream_middle else middle.stop, tail)


def split_of(config: Config, family: Family, model: nn.Module) -> tuple[Split, str | None]:
    """The blocks to skip, and where that split is from: the settings, a selection, a preset; None is scaled from FLUX.

    Args:
        model: the transformer, without weights will do.

    Raises:
        UserError: no block would be left, or the selection cannot be used.
    """
    skip, blocks = config.skip, family.layout.counts(model)
    given = skip.front is not None or skip.tail is not None
    if given and skip.selection:
        raise UserError("skip.selection chooses skip.front and skip.tail; give either the file or the numbers.")
    source: str | None
    try:
        if given:
            split, source = Split(skip.front or 0, skip.tail or 0), "skip.front and skip.tail"
        elif skip.selection:
            split, source = selected_split(skip.selection, family.name, blocks, skip.ratio), skip.selection
        else:
            split, source = split_for(family.name, blocks, skip.ratio)
        split.middle(sum(blocks))
    except ValueError as error:
        raise UserError(f"skip: {error}.") from None
    return split, source


def fixed_split(config: Config, split: Split) -> Config:
    """The config with the split of a selection written out, so that it no longer depends on that file."""
    if not config.skip.selection:
        return config
    skip = dataclasses.replace(config.skip, front=split.front, tail=split.tail, selection=None)
    return dataclasses.replace(config, skip=skip)
