"""The settings that a plan is compared with: plain LoRA, and the paper's ratios."""

from __future__ import annotations

import dataclasses

from blockskip.config import Config, SkipConfig
from blockskip.planner.plan import Plan
from blockskip.planner.request import Request, make_request

#: The skip ratios of the paper's tables.
RATIOS = (0.3, 0.4, 0.5)


@dataclasses.dataclass(frozen=True)
class Compared:
    """A plan among others.

    Args:
        name: what it is, in a few words.
        chosen: whether it is the user's own setting.
    """

    name: str
    plan: Plan
    chosen: bool = False


def compare(request: Request) -> list[Compared]:
    """Plans of plain LoRA at both resolutions, of the paper's ratios, and of the request, in this order.

    Everything but resolution, patches and skipping is as in the request. One that is the request's is not told twice.
    """
    config, setting = request.config, request.setting
    full, resolution = setting.config.data.full_resolution, setting.config.data.resolution
    assert full is not None and resolution is not None
    wanted = [
        (f"plain LoRA, {full} px", _with(config, 0.0, full, full)),
        (f"plain LoRA, {resolution} px", _with(config, 0.0, full, resolution)),
        *((f"skip {ratio:.0%}, {resolution} px", _with(config, ratio, full, resolution)) for ratio in RATIOS),
    ]
    own, rows = request.plan(), []
    for name, other in dict(wanted).items():  # where both resolutions are one, so is plain LoRA
        plan = make_request(other).plan()
        rows.append(Compared(name, plan, plan.split == own.split and plan.phases == own.phases))
    if not any(row.chosen for row in rows):
        streamed = ", streamed" if own.settings["train.stream_middle"] else ""
        rows.append(Compared(f"yours{streamed}: {own.skipped_blocks}/{own.num_blocks}, {resolution} px", own, True))
    return rows


def _with(config: Config, ratio: float, full: int, resolution: int) -> Config:
    skip = SkipConfig(ratio=ratio, selection=config.skip.selection)
    data = dataclasses.replace(config.data, full_resolution=full, resolution=resolution)
    patches = config.patches
    if ratio == 0:
        patches = dataclasses.replace(patches, direction="fixed")
    train = dataclasses.replace(config.train, stream_middle=False, lisa_blocks=0)
    return dataclasses.replace(config, skip=skip, data=data, patches=patches, train=train)
