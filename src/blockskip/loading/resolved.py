"""What a config leaves open, filled in from the model: resolutions, split, the family's defaults."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import nn

from blockskip import builtin
from blockskip.config import Config
from blockskip.errors import UserError
from blockskip.families import FAMILIES, Family
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


def check_positions(config: Config, source: ModelSource) -> None:
    """See that a model can be told where in its picture a patch lies, if it is to be.

    Raises:
        UserError: it is not given the positions of its tokens.
    """
    if config.patches.positions == "picture" and not source.family.takes_positions:
        able = ", ".join(family.name for family in FAMILIES if family.takes_positions)
        raise UserError(
            f'patches.positions = "picture" needs a model that is given the positions of its tokens ({able}); '
            f'{source.family.name} is not: leave it at "patch".'
        )


def resolved(config: Config, source: ModelSource, full: int, resolution: int, device: torch.device) -> Config:
    """The config with every default filled in that depends on the model or the device.

    Args:
        full, resolution: of ``resolutions``.
    """
    defaults = source.family.defaults
    data = dataclasses.replace(
        config.data, full_resolution=full, resolution=resolution,
        text_length=config.data.text_length or source.text_length,
        images=config.data.images and _absolute(config.data.images),
        class_images=config.data.class_images and _absolute(config.data.class_images),
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
        transformer=config.model.transformer and _absolute(config.model.transformer),
        base_adapters=tuple(str(Path(path).expanduser().resolve()) for path in config.model.base_adapters),
    )
    return dataclasses.replace(config, model=model, data=data, sigma=sigma, lora=lora, train=train)


def _absolute(path: str) -> str:
    """A path as it is found from any directory."""
    return str(Path(path).expanduser().absolute())


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
    skip = config.skip
    if skip.middle and (skip.front_mode, skip.tail_mode) != ("features", "residual"):
        found.append("skip.middle leaves no front and no tail; leave skip.front_mode and skip.tail_mode out.")
    elif skip.front_mode == "keep" and skip.tail_mode != "residual" and skip.rule != "residual":
        found.append(
            f'skip.rule = "{skip.rule}" has no blocks to stand in for: skip.front_mode = "keep" and '
            f'skip.tail_mode = "{skip.tail_mode}" run them all; leave skip.rule out.'
        )
    if skip.middle_start is not None and not skip.middle:
        found.append("skip.middle_start places the blocks that skip.middle counts; set skip.middle too.")
    if config.train.lisa_blocks:
        found += _of_lisa(config)
    if config.data.class_images and not config.data.class_prompt:
        found.append("data.class_images needs data.class_prompt, the caption of the class pictures.")
    return found


def _of_lisa(config: Config) -> list[str]:
    """What full training of blocks does not go with."""
    found = []
    if config.model.quantization != "none":
        found.append("train.lisa_blocks trains the weights themselves; leave model.quantization out, which packs them.")
    if config.train.stream_middle:
        found.append("train.lisa_blocks trains the weights themselves; train.stream_middle keeps them in the file.")
    if config.lora.freeze_a or config.lora.targets:
        found.append("train.lisa_blocks trains blocks without LoRA; leave lora.freeze_a and lora.targets out.")
    return found


def stored_split(config: Config, split: Split) -> Split:
    """The part of a split that stored features stand in for: what is kept or streamed is run, and needs none."""
    front, tail = config.skip.front_mode == "features", config.skip.tail_mode == "residual"
    return Split(split.front if front else 0, split.tail if tail else 0, split.inner)


def streamed_blocks(config: Config, split: Split, num_blocks: int) -> tuple[int, ...]:
    """The numbers of the blocks that are read for each run of them while training, ascending."""
    middle = split.middle(num_blocks) if config.train.stream_middle else ()
    tail = split.tail if config.skip.tail_mode == "stream" else 0
    return (*middle, *range(num_blocks - tail, num_blocks))


def resident_blocks(config: Config, split: Split, num_blocks: int) -> tuple[int, ...]:
    """The numbers of the blocks whose weights are in memory all the time while training, frozen or with LoRA."""
    away = {*stored_split(config, split).skipped(num_blocks), *streamed_blocks(config, split, num_blocks)}
    return tuple(index for index in range(num_blocks) if index not in away)


def split_of(config: Config, family: Family, model: nn.Module) -> tuple[Split, str | None]:
    """The blocks to skip, and where that split is from: the settings, a selection, a preset; None is scaled from FLUX.

    Args:
        model: the transformer, without weights will do.

    Raises:
        UserError: no block would be left, or the selection cannot be used, or LISA has not all blocks to choose from.
    """
    split, source = _chosen_split(config, family, model)
    wanted, count = config.train.lisa_blocks, family.layout.count(model)
    if wanted and split.skipped(count):
        raise UserError(
            "train.lisa_blocks chooses from all blocks of the model: set skip.ratio to 0, or skip.front and skip.tail, "
            "and leave skip.middle out."
        )
    if wanted > count:
        raise UserError(f"train.lisa_blocks = {wanted} is more than the {count} blocks of this model.")
    return split, source


def _chosen_split(config: Config, family: Family, model: nn.Module) -> tuple[Split, str | None]:
    skip, blocks = config.skip, family.layout.counts(model)
    given = skip.front is not None or skip.tail is not None
    if skip.middle:
        return _inner_split(config, family, model), "skip.middle"
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


def _inner_split(config: Config, family: Family, model: nn.Module) -> Split:
    """The split that skips a run inside; it is placed centrally where the settings do not place it."""
    skip, layout = config.skip, family.layout
    if skip.front or skip.tail or skip.selection:
        raise UserError(
            f"skip.middle = {skip.middle} skips blocks in the middle alone: skip.front and skip.tail must be 0 or left "
            "out, and skip.selection left out."
        )
    names = layout.names(model)
    start = (len(names) - skip.middle) // 2 if skip.middle_start is None else skip.middle_start
    split = Split(0, 0, (start, start + skip.middle))
    try:
        split.middle(len(names))
    except ValueError as error:
        raise UserError(f"skip.middle: {error}.") from None
    if len({layout.returns_of(name) for name in names[start - 1 : start + skip.middle]}) > 1:
        raise UserError(
            f"skip.middle = {skip.middle} from block {start}: between {names[start - 1]} and "
            f"{names[start + skip.middle - 1]} the model joins its streams, and no residual can span that; "
            "choose another skip.middle_start."
        )
    return split


def fixed_split(config: Config, split: Split) -> Config:
    """The config with the split of a selection written out, so that it no longer depends on that file."""
    if not config.skip.selection:
        return config
    skip = dataclasses.replace(config.skip, front=split.front, tail=split.tail, selection=None)
    return dataclasses.replace(config, skip=skip)
