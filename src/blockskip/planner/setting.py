"""What a plan is made for: a config held against a model, without pictures, weights or an output folder."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass

import torch

from blockskip.adapters.lora import target_names
from blockskip.config import Config
from blockskip.errors import UserError
from blockskip.families import Family
from blockskip.features.rules import load_rule
from blockskip.loading.resolved import (
    check_positions,
    fixed_split,
    resident_blocks,
    resolutions,
    resolved,
    split_of,
    stored_split,
    streamed_blocks,
)
from blockskip.loading.source import ModelSource
from blockskip.loading.transformer import empty_transformer
from blockskip.method.skipping import SkipRule
from blockskip.method.split import Split
from blockskip.precision import DTYPES
from blockskip.settings import size_in_bytes

#: Captions that are encoded when nothing is known of the pictures: theirs, and the empty one.
CAPTIONS = 2


@dataclass(frozen=True)
class Setting:
    """A run as far as its memory depends on it.

    Args:
        config: with every default filled in.
        size: (width, height) in pixels of the samples.
        groups: distinct groups of samples that are encoded, and precomputed.
        captions: distinct prompts that are encoded for training.
        reference: count as the paper's recipe ran: PEFT's cast of layer inputs to float32 on, text tokens in the step.
        split_source: who chose the split; None: it was scaled from the paper's splits of FLUX.1.
    """

    source: ModelSource
    config: Config
    split: Split
    num_blocks: int
    rule: SkipRule
    targets: tuple[str, ...]
    device: torch.device
    dtype: torch.dtype
    size: tuple[int, int]
    groups: int
    captions: int = CAPTIONS
    reference: bool = False
    split_source: str | None = None

    @property
    def family(self) -> Family:
        """The architecture of the training step; in the reference, text tokens are in it though no block reads them."""
        family = copy.copy(self.source.family)
        if self.reference:
            vars(family)["text_in_blocks"] = True
        return family

    @property
    def stored(self) -> Split:
        """The blocks that stored features stand in for."""
        return stored_split(self.config, self.split)

    @property
    def streamed(self) -> range:
        """The blocks that are read for each run of them while training."""
        return streamed_blocks(self.config, self.split, self.num_blocks)

    @property
    def resident(self) -> tuple[int, ...]:
        """The blocks whose weights are in memory all the time while training."""
        return resident_blocks(self.config, self.split, self.num_blocks)

    @property
    def pool(self) -> bool:
        """Whether device and host are one memory."""
        return self.device.type in ("cpu", "mps")

    @property
    def guidance(self) -> float:
        """The guidance input in training."""
        value = self.config.train.guidance_scale
        return 1.0 if value is None else value

    @property
    def text_length(self) -> int:
        """Text tokens."""
        return self.config.data.text_length or self.source.text_length


def make_setting(
    source: ModelSource,
    config: Config,
    device: torch.device,
    *,
    size: tuple[int, int] | None = None,
    captions: int = CAPTIONS,
    groups: int | None = None,
    reference: bool = False,
) -> Setting:
    """The setting of a config for a device, which need not be there.

    Args:
        size: of the samples; by default a square of the training resolution.
        groups: distinct groups; by default one for every micro-step, or ``features.pool``.

    Raises:
        UserError: the settings cannot be used with the model.
    """
    check_positions(config, source)
    full, resolution = resolutions(config, source)
    stride = source.pixel_stride
    for key, value in (("data.resolution", resolution), ("data.full_resolution", full)):
        if value % stride:
            near = max(stride, round(value / stride) * stride)
            raise UserError(f"{key} = {value} is no multiple of the model's pixel stride {stride}; take {near}.")
    if config.model.dtype == "auto":  # of the planned device, not of this machine's
        dtype = "float32" if device.type == "cpu" else "bfloat16"
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype=dtype))
    config = resolved(config, source, full, resolution, device)
    layout, model = source.family.layout, empty_transformer(source)
    split, split_source = split_of(config, source.family, model)
    config = fixed_split(config, split)
    middle = split.middle(layout.count(model))
    wanted = config.lora.targets or source.family.lora_targets
    lora = not config.train.lisa_blocks
    targets = target_names(model, layout, middle, wanted, each=bool(config.lora.targets)) if lora else []
    micro = config.train.steps * config.train.gradient_accumulation_steps
    distinct = groups or min(micro, config.features.pool or micro)
    return Setting(
        source, config, split, layout.count(model), load_rule(config.skip.rule)[0], tuple(targets), device,
        DTYPES[config.model.dtype], size or (resolution, resolution), distinct, captions, reference, split_source,
    )  # fmt: skip


def window_bytes(setting: Setting) -> int:
    """Memory for one precompute window."""
    return size_in_bytes("features.window", setting.config.features.window)


def disk_limit(setting: Setting) -> int | None:
    """Largest feature store, if there is a limit."""
    limit = setting.config.features.disk
    return size_in_bytes("features.disk", limit) if limit else None
