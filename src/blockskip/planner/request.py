"""What a user asks for, checked and made into a setting: the device, the pictures if there are any, the remarks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from blockskip.config import Config
from blockskip.data.pictures import Picture, read_pictures
from blockskip.data.sizes import training_size
from blockskip.errors import UserError
from blockskip.loading.quantized import check_quantization
from blockskip.loading.resolved import conflicts, resolutions
from blockskip.loading.source import ModelSource
from blockskip.loading.transformer import empty_transformer
from blockskip.planner.make import make_plan
from blockskip.planner.named import open_for_plan
from blockskip.planner.plan import Plan
from blockskip.planner.setting import CAPTIONS, Setting, make_setting
from blockskip.precision import resolve_device
from blockskip.presets import unmeasured
from blockskip.settings import to_flat, wrong_sizes
from blockskip.training.optimizer import check_optimizer


@dataclasses.dataclass(frozen=True)
class Request:
    """A checked request.

    Args:
        config: as it was given.
        remarks: sentences about what was assumed.
    """

    config: Config
    setting: Setting
    remarks: tuple[str, ...]

    def plan(self, *, previews: bool = True) -> Plan:
        """The plan, under the names that the user gave.

        Args:
            previews: of ``make_plan``.
        """
        plan, given = make_plan(self.setting, self.remarks, previews=previews), self.config
        names = {
            "model.path": given.model.path, "output": given.output, "data.images": given.data.images,
            "data.prompt": given.data.prompt, "data.class_images": given.data.class_images,
            "data.class_prompt": given.data.class_prompt, "train.batch_size": given.train.batch_size,
        }  # fmt: skip
        return dataclasses.replace(plan, settings=plan.settings | names)


def planned_device(name: str) -> torch.device:
    """The device to plan for, which need not be there; ``auto`` is this machine's accelerator, else CUDA.

    Raises:
        UserError: there is no such kind of device.
    """
    if name == "auto":
        found = resolve_device("auto")
        return torch.device("cuda") if found.type == "cpu" else found
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda", "mps"):
        raise UserError(f'train.device = "{name}" is not a device to plan for; use "cuda", "cpu" or "mps".')
    return torch.device(device.type)


def make_request(config: Config) -> Request:
    """Check a config against its model and, where there are any, its pictures.

    Raises:
        UserError: everything that is wrong, as far as it can be told at once.
    """
    problems = conflicts(config)

    def attempt(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except UserError as error:
            problems.extend(error.problems)
            return None

    device = attempt(planned_device, config.train.device)
    attempt(check_quantization, config.model.quantization)
    attempt(check_optimizer, config.train.optimizer, device or torch.device("cpu"))
    problems += wrong_sizes(to_flat(config))
    opened = attempt(open_for_plan, config.model.path, config.model.revision, config.model.transformer)
    if opened is None or device is None:
        raise UserError(problems)
    source, remarks = opened
    full, resolution = resolutions(config, source)
    if resolution > full:
        problems.append(f"data.resolution = {resolution} is larger than data.full_resolution = {full}.")
    pictures = attempt(_pictures, config, resolution, full) or []
    counted = config
    if config.data.class_images:  # each group has as many of them as of the subject
        counted = dataclasses.replace(
            config, train=dataclasses.replace(config.train, batch_size=2 * config.train.batch_size)
        )
    size = _size(config, source, pictures, resolution)
    captions = len({picture.caption for picture in pictures}) + (config.data.caption_dropout > 0)
    setting = attempt(make_setting, source, counted, device, size=size, captions=captions if pictures else CAPTIONS)
    if problems:
        raise UserError(problems)
    if config.train.device == "auto" and resolve_device("auto").type == "cpu":
        remarks = (*remarks, "Planned for CUDA; --device cpu or mps plans for those.")
    if device.type in ("cpu", "mps"):
        remarks = (*remarks, "Device and host are one memory here: host memory includes what is on the device.")
    budget = config.memory
    if (budget.device or budget.host or budget.disk) and not pictures and setting.text_length < source.text_length:
        text = f"Text is cut to {setting.text_length} tokens: without pictures, captions are taken to be that short."
        remarks = (*remarks, text)
    if setting.split_source is None:
        blocks = source.family.layout.counts(empty_transformer(source))
        remarks = (*remarks, unmeasured(setting.split, source.family.name, blocks))
    return Request(config, setting, remarks)


def _pictures(config: Config, resolution: int, full: int) -> list[Picture]:
    found: list[Picture] = []
    for key, folder, prompt in (
        ("images", config.data.images, config.data.prompt),
        ("class_images", config.data.class_images, config.data.class_prompt),
    ):
        if folder:
            sizes = {"resolution": resolution, "full_resolution": full}
            found += read_pictures(folder, prompt or "", **sizes, key=f"data.{key}")
    return found


def _size(config: Config, source: ModelSource, pictures: list[Picture], resolution: int) -> tuple[int, int] | None:
    """(width, height) in pixels of the largest samples; None: squares of the training resolution."""
    if config.patches.shape == "square" or not pictures:
        return None
    sizes = {training_size(picture.scaled, resolution, source.pixel_stride) for picture in pictures}
    return max(sizes, key=lambda size: (size[0] * size[1], size))
