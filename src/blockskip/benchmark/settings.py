"""The settings that are compared: each is the one training loop with a few keys changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from blockskip.errors import UserError
from blockskip.method.split import skipped_count, split_for_ratio
from blockskip.settings import leaves


@dataclass(frozen=True)
class Setting:
    """One row of the table.

    Args:
        name: as it is asked for.
        title: as the table has it.
        full: trains at the full resolution; else at the training resolution, half of it by default.
        values: what differs from plain LoRA, by dotted key.
        ratio: share of the blocks that is skipped or kept without LoRA; the split is the model's own.
        ends: where these blocks lie instead: all at the ``front``, all at the ``tail``, as the ``paper``
            shares them, or all in the ``middle``.
        rate: factor on the learning rate, for settings that train full weights.
    """

    name: str
    title: str
    full: bool
    values: Mapping[str, Any] = field(default_factory=dict)
    ratio: float = 0.0
    ends: Literal["front", "tail", "paper", "middle"] | None = None
    rate: float = 1.0

    def config(self, num_blocks: int, full_resolution: int, resolution: int) -> dict[str, Any]:
        """The settings of a run by dotted key.

        Args:
            num_blocks: L, for settings that skip at one end.
            full_resolution, resolution: in pixels.
        """
        values: dict[str, Any] = {
            "data.full_resolution": full_resolution,
            "data.resolution": full_resolution if self.full else resolution,
            "patches.direction": "fixed",
        }
        if self.ends == "middle":
            values |= {"skip.front": 0, "skip.tail": 0, "skip.middle": skipped_count(self.ratio, num_blocks)}
        elif self.ends is not None:
            count, paper = skipped_count(self.ratio, num_blocks), split_for_ratio(self.ratio, num_blocks)
            front = {"front": count, "tail": 0, "paper": paper.front}[self.ends]
            values |= {"skip.front": front, "skip.tail": count - front}
        elif self.ratio:
            values["skip.ratio"] = self.ratio
        else:
            values |= {"skip.front": 0, "skip.tail": 0}
        return values | dict(self.values)

    @property
    def known(self) -> bool:
        """Whether this version of the package has the keys that the setting changes."""
        return {*self.values, *(["skip.middle"] if self.ends == "middle" else [])} <= set(leaves())


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.0f}"


_RATIOS = (0.3, 0.4, 0.5)
_LOW_TO_HIGH = {"patches.direction": "low-to-high"}
_NONE = {"skip.rule": "none"}
_KEEP = {"skip.front_mode": "keep", "skip.tail_mode": "keep"}

#: Every setting by name, in the order of the table.
SETTINGS: dict[str, Setting] = {
    setting.name: setting
    for setting in (
        Setting("lora", "LoRA", True),
        Setting("resize", "resize only", False),
        Setting("patches", "patches, low to high", False, _LOW_TO_HIGH),
        Setting("patches-random", "patches, random", False, {"patches.direction": "random"}),
        Setting("patches-high-to-low", "patches, high to low", False, {"patches.direction": "high-to-low"}),
        *(Setting(f"skip-{_percent(r)}", f"skip {_percent(r)}%", True, {}, r) for r in _RATIOS),
        *(
            Setting(f"skip-{_percent(r)}-no-residual", f"skip {_percent(r)}%, no residual", True, _NONE, r)
            for r in _RATIOS
        ),
        Setting("paper-50", "skip 50%, the paper's shares", True, {}, 0.5, "paper"),
        Setting("front-50", "skip the first 50%", True, {}, 0.5, "front"),
        Setting("tail-50", "skip the last 50%", True, {}, 0.5, "tail"),
        Setting("kept-50", "LoRA in half the blocks", True, _KEEP, 0.5),
        Setting("lora-fa", "LoRA-FA", True, {"lora.freeze_a": True}),
        Setting("lisa", "LISA", True, {"train.lisa_blocks": 2, "train.lisa_period": 10}, rate=0.05),
        Setting("hollow-30", "HollowedNet's blocks, 30%", True, {}, 0.3, "middle"),
        *(
            Setting(f"blockskip-{_percent(r)}", f"DiT-BlockSkip {_percent(r)}%", False, _LOW_TO_HIGH, r)
            for r in _RATIOS
        ),
    )
}
#: What everything else is measured by; always among the rows.
REFERENCE = "lora"
#: The first table. Of the two settings that skip at one end it has the front, which is exact; others are added by name.
CORE = (
    "lora", "resize", "patches", "skip-50", "skip-50-no-residual", "front-50", "blockskip-30", "blockskip-50",
)  # fmt: skip
#: Of ``--quick``.
QUICK = ("lora", "patches", "blockskip-50")


def known_settings() -> dict[str, Setting]:
    """The settings whose keys this version of the package has."""
    return {name: setting for name, setting in SETTINGS.items() if setting.known}


def chosen(names: Sequence[str]) -> list[Setting]:
    """Settings by name in the table's order, the reference first; ``core`` and ``all`` stand for several.

    Raises:
        UserError: there is no setting of a name.
    """
    known = known_settings()
    wanted = {REFERENCE}
    problems = []
    for name in names:
        if name in ("core", "all"):
            wanted |= set(CORE if name == "core" else known)
        elif name in known:
            wanted.add(name)
        else:
            problems.append(f'--settings "{name}" is not one of core, all, {", ".join(known)}.')
    if problems:
        raise UserError(problems)
    return [setting for name, setting in known.items() if name in wanted]
