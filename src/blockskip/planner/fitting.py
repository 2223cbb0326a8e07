"""A config whose open settings are chosen so that every phase is within the budget that the config names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from blockskip.config import Config
from blockskip.data.pictures import read_pictures
from blockskip.errors import UserError
from blockskip.planner.budget import Budget, Fitted, describe, fit, refused
from blockskip.planner.request import make_request, planned_device
from blockskip.settings import from_flat, size_in_bytes, to_flat, wrong_sizes


def config_of(
    values: Mapping[str, Any], device: torch.device | None = None, origins: Mapping[str, str] | None = None
) -> tuple[Config, list[str]]:
    """The config of dotted keys, fitted if they name a budget, and what was chosen for it, a line each.

    Args:
        values: what the user set; these keys stay as they are.
        device: where the run will be; None: where a plan is made for.
        origins: whose the keys are that the user did not give himself, as ``refused`` tells them.

    Raises:
        UserError: a value cannot be used, or nothing fits. Of sizes that are none it is told with all else that is
            wrong, by what uses the config, which is not fitted then.
    """
    config = from_flat(dict(values))
    if wrong_sizes(values):
        return config, []
    sizes = {
        name: size_in_bytes(f"memory.{name}", text)
        for name in ("device", "host", "disk")
        if (text := getattr(config.memory, name))
    }
    if not sizes:
        return config, []
    device = device or planned_device(config.train.device)
    budget = Budget(**sizes)
    if device.type in ("cpu", "mps"):  # one memory: the smaller figure bounds it
        bounds = [bound for bound in (budget.device, budget.host) if bound is not None]
        budget = replace(budget, device=None, host=min(bounds, default=None))
    found = fit_config(config, set(values), budget, device)
    if found.misses:
        raise UserError(refused(found, budget, origins))
    return found.config, describe(found)


def fit_config(config: Config, fixed: set[str], budget: Budget, device: torch.device) -> Fitted:
    """``fit`` for a device."""
    kind = device.type

    def plan(wanted: Config) -> Any:
        return make_request(replace(wanted, train=replace(wanted.train, device=kind))).plan(previews=False)

    return fit(config, fixed, budget, plan, _longest_caption(config))


def _longest_caption(config: Config) -> int:
    """Tokens of the longest caption or prompt at most: a token of a text has two bytes or more, but for odd signs."""
    texts = [config.data.prompt or "", config.data.class_prompt or "", *config.preview.prompts]
    if config.data.images:
        sizes = {"resolution": config.data.resolution or 8, "full_resolution": config.data.full_resolution or 8}
        texts += [picture.caption for picture in read_pictures(config.data.images, config.data.prompt or "", **sizes)]
    return max(len(text.encode()) for text in texts) // 2 + 8


def given_keys(config: Config) -> dict[str, Any]:
    """The keys of a config that differ from the defaults: what counts as set by the user of a whole config."""
    defaults = to_flat(Config())
    return {name: value for name, value in to_flat(config).items() if value != defaults[name]}
