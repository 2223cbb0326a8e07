"""What a config leaves open, filled in from the model: resolutions, split, the family's defaults."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from blockskip import builtin
from blockskip.config import Config
from blockskip.errors import UserError
from blockskip.loading.source import ModelSource
from blockskip.method.split import Split, split_for_ratio
from blockskip.precision import resolve_dtype


def resolutions(config: Config, source: ModelSource) -> tuple[int, int]:
    """(full resolution, training resolution) in pixels."""
    stride = source.pixel_stride
    full = config.data.full_resolution or max(source.full_resolution, config.data.resolution or 0)
    return full, config.data.resolution or max(stride, full // 2 // stride * stride)


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


def split_of(config: Config, num_blocks: int) -> Split:
    """The blocks to skip, of a model with ``num_blocks``.

    Raises:
        UserError: no block would be left.
    """
    skip = config.skip
    try:
        if skip.front is not None or skip.tail is not None:
            split = Split(skip.front or 0, skip.tail or 0)
        else:
            split = split_for_ratio(skip.ratio, num_blocks)
        split.middle(num_blocks)
    except ValueError as error:
        raise UserError(f"skip: {error}.") from None
    return split
