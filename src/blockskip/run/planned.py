"""What a prepared run was planned to take: with its own pictures, groups and captions, phase by phase."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from blockskip.config import Config
from blockskip.measure import Peaks
from blockskip.memory import release, return_freed
from blockskip.planner.budget import Budget
from blockskip.planner.make import make_plan
from blockskip.planner.plan import Plan
from blockskip.planner.setting import Setting, make_setting
from blockskip.progress import say
from blockskip.run.prepare import Prepared
from blockskip.settings import from_flat, size_in_bytes, to_flat

#: Kinds of device whose memory is that of the host.
POOLS = ("cpu", "mps")


def plan_run(prepared: Prepared) -> Plan | None:
    """The plan of a run; None, and a sentence that says why, where there can be none. Nothing of it stays in memory."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make_plan(setting_of(prepared), previews=False)
    except Exception as error:  # whatever it is: a run does not fail for the figures beside its own
        reason = " ".join(str(error).split())[:200]
        say(f"Warning: this run could not be planned ({type(error).__name__}: {reason}); its memory is only measured.")
        return None
    finally:
        release()


def setting_of(prepared: Prepared, values: Mapping[str, Any] | None = None) -> Setting:
    """What the plan of a run is made for.

    Args:
        values: dotted keys that differ from those of the run.

    Raises:
        UserError: the run cannot have these values.
    """
    config, schedule = from_flat(to_flat(prepared.config) | dict(values or {})), prepared.schedule
    if config.data.class_images:  # each group has as many of them as of the subject
        config = replace(config, train=replace(config.train, batch_size=2 * config.train.batch_size))
    size = None if config.patches.shape == "square" else max((group.size for group in schedule.groups), key=_area)
    return make_setting(
        prepared.source, config, torch.device(prepared.device.type), size=size, captions=len(schedule.captions()),
        groups=len(schedule.groups),
    )  # fmt: skip


def peaks_of(plan: Plan | None) -> dict[str, Peaks]:
    """The planned peaks by the phases that a run measures: checkpoints are written while it trains."""
    if plan is None:
        return {}
    pool = plan.device in POOLS
    found = {
        name: Peaks(phase.host_peak_bytes, 0 if pool else phase.device_peak_bytes)
        for name, phase in plan.used().items()
    }
    saving = found.pop("save", None)
    if saving is not None:
        found["train"] = found["train"].merged(saving)
    return found


def budget_of(config: Config, device: torch.device) -> Budget:
    """The budget that a config names; where device and host are one memory, the smaller figure bounds it."""
    sizes = {
        name: size_in_bytes(f"memory.{name}", text)
        for name in ("device", "host", "disk")
        if (text := getattr(config.memory, name))
    }
    if device.type in POOLS:
        bounds = [sizes.pop(name) for name in ("device", "host") if name in sizes]
        sizes |= {"host": min(bounds)} if bounds else {}
    return Budget(**sizes)


def hold_memory(config: Config, device: torch.device) -> bool:
    """Keep the process near its plan (``memory.return_freed``); returns whether that was wanted and could be done.

    Wanted is by default what costs nothing, with a GPU, or was asked for, with a budget.
    """
    wanted = config.memory.return_freed
    if wanted is None:
        wanted = device.type not in POOLS or bool(config.memory.device or config.memory.host)
    return wanted and return_freed()


def _area(size: tuple[int, int]) -> tuple[int, tuple[int, int]]:
    return size[0] * size[1], size
