"""Everything that can be known and checked before any weights are read."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from blockskip.adapters.frozen import FrozenAdapters
from blockskip.adapters.lora import target_names
from blockskip.config import Config
from blockskip.data.pictures import read_pictures
from blockskip.data.schedule import Schedule, make_schedule, sample_places
from blockskip.errors import UserError
from blockskip.features.rules import load_rule
from blockskip.loading.quantized import check_quantization
from blockskip.loading.resolved import (
    check_positions,
    conflicts,
    fixed_split,
    resident_blocks,
    resolutions,
    resolved,
    split_of,
    stored_split,
    streamed_blocks,
)
from blockskip.loading.source import ModelSource, open_model
from blockskip.loading.transformer import empty_transformer
from blockskip.method.skipping import SkipRule
from blockskip.method.split import Split
from blockskip.precision import check_dtype, resolve_device, resolve_dtype
from blockskip.run.large import check_previews
from blockskip.settings import size_in_bytes, to_flat, wrong_sizes
from blockskip.training.optimizer import check_optimizer

#: Settings that may differ when a run is continued; all others decide what has been learnt so far.
MAY_CHANGE = {
    "output", "train.steps", "train.learning_rate", "train.lr_scheduler", "train.lr_warmup_steps", "train.weight_decay",
    "train.max_grad_norm", "train.checkpoint_every", "train.checkpoints_total_limit", "features.window",
    "features.window_on", "features.disk", "features.cache", "features.keep", "data.images", "data.class_images",
    "model.path", "model.transformer", "model.base_adapters", "model.stream_text_encoders", "model.read_ahead",
    "skip.rule", "train.gradient_checkpointing", "train.stream_middle", "train.device",
}  # fmt: skip


def may_change(name: str) -> bool:
    """Whether a continued run may have another value of a setting."""
    return name in MAY_CHANGE or name.startswith(("preview.", "memory."))


@dataclass(frozen=True)
class Counts:
    """Parameters of the transformer: in skipped blocks, in what is loaded for training, and trained at once."""

    skipped: int
    kept: int
    trained: int


@dataclass(frozen=True)
class Prepared:
    """A run whose settings were checked and whose schedule is fixed.

    Args:
        config: with every default filled in.
        targets: full names of the layers that take LoRA.
        window_bytes: of the states of one precompute window.
        disk_bytes: largest feature store; None is unlimited.
        split_source: who chose the split; None: it was scaled from the paper's splits of FLUX.1.
    """

    config: Config
    source: ModelSource
    schedule: Schedule
    split: Split
    num_blocks: int
    rule: SkipRule
    rule_identity: str
    adapters: FrozenAdapters
    targets: list[str]
    counts: Counts
    guidance: float
    text_length: int
    device: torch.device
    dtype: torch.dtype
    window_bytes: int
    disk_bytes: int | None
    split_source: str | None = None

    @property
    def output(self) -> Path:
        """The run's folder."""
        return Path(self.config.output).expanduser()

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
    def places(self) -> list[torch.Tensor | None]:
        """Where each group's patches lie in their pictures, (B, 4); None where each is as a picture of its own."""
        if self.config.patches.positions == "patch":
            return [None] * len(self.schedule.groups)
        return [sample_places(self.schedule, group, self.source.pixel_stride) for group in self.schedule.groups]

    def fingerprint(self) -> dict[str, str]:
        """Of every setting, and of the pictures, that a continued run must share with what was done before."""
        flat = to_flat(self.config)
        kept = {name: repr(value) for name, value in flat.items() if not may_change(name)}
        pictures = [[item.sha256, item.caption, item.is_class] for item in self.schedule.pictures]
        kept["the pictures and captions"] = hashlib.sha256(json.dumps(pictures).encode()).hexdigest()
        if self.config.skip.front is None and self.config.skip.tail is None:  # of a preset, which may be mended
            kept["split of that skip.ratio"] = f"{self.split.front}, {self.split.tail}"
        kept["the rule's file"] = self.rule_identity
        kept["the base adapters' files"] = repr(self.adapters.identity())
        return kept


def prepare(config: Config) -> Prepared:
    """Check a config against the model and the pictures, fill in defaults and fix the schedule. No weights are read.

    Raises:
        UserError: everything that is wrong, as far as it can be told at once.
    """
    problems: list[str] = []

    def attempt(function, *args, **kwargs):  # type: ignore[no-untyped-def]
        try:
            return function(*args, **kwargs)
        except UserError as error:
            problems.extend(error.problems)

    if not config.output:
        problems.append('output is not set; give the folder to write, for example --output "out/".')
    for name, folder in (("output", config.output), ("features.cache", config.features.cache)):
        if folder:
            attempt(_check_writable, name, folder)
    if not config.data.images:
        problems.append('data.images is not set; give the folder of pictures, for example --images "photos/".')
    device = attempt(resolve_device, config.train.device)
    if device is not None:
        attempt(check_dtype, resolve_dtype(config.model.dtype, device), device)
    rule = attempt(load_rule, config.skip.rule)
    window = attempt(size_in_bytes, "features.window", config.features.window)
    disk = attempt(size_in_bytes, "features.disk", config.features.disk) if config.features.disk else None
    attempt(check_quantization, config.model.quantization)
    attempt(check_optimizer, config.train.optimizer, device or torch.device("cpu"))
    problems += wrong_sizes({name: value for name, value in to_flat(config).items() if name.startswith("memory.")})
    problems += conflicts(config)
    adapters = attempt(FrozenAdapters, config.model.base_adapters)
    source = attempt(open_model, config.model.path, config.model.revision, config.model.transformer)
    found = None if source is None else attempt(resolutions, config, source)
    if source is not None:
        attempt(check_positions, config, source)
    full, resolution = found or (8, 8)  # the pictures are looked at all the same: all problems are told at once
    pictures = []
    if config.data.images:
        sizes = {"resolution": resolution, "full_resolution": full}
        pictures = attempt(read_pictures, config.data.images, config.data.prompt, **sizes) or []
        if config.data.class_images and config.data.class_prompt:
            pictures = pictures + (attempt(
                read_pictures, config.data.class_images, config.data.class_prompt, **sizes, key="data.class_images",
                prompt_key="data.class_prompt", is_class=True,
            ) or [])  # fmt: skip
    if source is None or found is None:
        raise UserError(problems)
    model = empty_transformer(source)
    layout = source.family.layout
    split, split_source = attempt(split_of, config, source.family, model) or (None, None)
    targets: list[str] = []
    if split is not None and not config.train.lisa_blocks:
        wanted = config.lora.targets or source.family.lora_targets
        middle = split.middle(layout.count(model))
        targets = attempt(target_names, model, layout, middle, wanted, each=bool(config.lora.targets)) or []
    if adapters is not None:
        attempt(adapters.check, model)
    if config.preview.prompts:
        attempt(check_previews, config, source, device or torch.device("cpu"))
    config = resolved(config, source, full, resolution, device or torch.device("cpu"))
    config = config if split is None else fixed_split(config, split)
    schedule = None
    if pictures:
        assert config.sigma.distribution is not None and config.sigma.shift is not None
        schedule = attempt(
            make_schedule, config, pictures, resolution=resolution, full_resolution=full, stride=source.pixel_stride,
            distribution=config.sigma.distribution, shift=config.sigma.shift,
        )  # fmt: skip
    if problems:
        raise UserError(problems)
    assert split is not None and schedule is not None and config.train.guidance_scale is not None
    return Prepared(
        config, source, schedule, split, layout.count(model), *rule, adapters, targets,
        _count(model, config, source, split, targets), config.train.guidance_scale,
        config.data.text_length or source.text_length, device, resolve_dtype(config.model.dtype, device), window, disk,
        split_source,
    )  # fmt: skip


def _check_writable(name: str, folder: str) -> None:
    """Tell whether a folder can be made or written; it is not made.

    Raises:
        UserError: it, or what would hold it, is a file or must not be written.
    """
    path = Path(folder).expanduser()
    try:
        nearest = next(part for part in (path, *path.absolute().parents) if part.exists())
    except OSError as error:
        raise UserError(f'{name} = "{folder}" cannot be used: {error.strerror}; give another folder.') from None
    if not nearest.is_dir():
        what = "is a file" if nearest == path else f'lies below "{nearest}", which is a file'
        raise UserError(f'{name} = "{folder}" {what}; give a folder.')
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f'{name} = "{folder}" must not be written by this user; give another folder.')


def _count(model: nn.Module, config: Config, source: ModelSource, split: Split, targets: list[str]) -> Counts:
    layout, rank = source.family.layout, config.lora.rank
    count = layout.count(model)
    skipped = {*split.skipped(count)} - {*resident_blocks(config, split, count)}
    left_out = sum(
        value.numel() for index, block in enumerate(layout.blocks(model)) if index in skipped
        for value in block.parameters()
    )  # fmt: skip
    total = sum(value.numel() for value in model.parameters())
    if config.train.lisa_blocks:
        sizes = sorted(sum(value.numel() for value in block.parameters()) for block in layout.blocks(model))
        return Counts(left_out, total - left_out, sum(sizes[-config.train.lisa_blocks :]))
    shapes = [model.get_submodule(name).weight.shape for name in targets]
    ends = [(int(shape[0]), 0 if config.lora.freeze_a else int(shape[1])) for shape in shapes]  # type: ignore[index, union-attr]
    return Counts(left_out, total - left_out, sum(rank * (above + below) for above, below in ends))
