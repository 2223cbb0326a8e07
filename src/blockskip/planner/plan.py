"""The result of planning: what each phase takes, as numbers, JSON and text."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from blockskip.planner.counting import DEVICE_ROLES, LiveBytes

#: The phases in their order.
PHASES = ("encode text", "encode pictures", "precompute", "train", "preview", "save")


@dataclass(frozen=True)
class PhasePlan:
    """What one phase takes. Sizes are bytes; host memory is above the process after its imports.

    Args:
        device_peak_bytes: tensors on the device at most.
        device: the same by what holds it (``counting.DEVICE_ROLES``).
        host_peak_bytes: of host memory, private and mapped together; where device and host are one memory, of both.
        host: what host memory is held by, by name; its sum may exceed the peak, since not all of it is held at once.
        disk_bytes: written to disk and kept while the run needs it.
        read_bytes: of weights and features read from disk.
        flops_forward, flops_backward: floating-point operations of the whole phase; a multiply-add counts as two.
        used: whether the run has this phase.
        seconds: estimated from a timing on this machine; None where none was asked for.
    """

    device_peak_bytes: int = 0
    device: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DEVICE_ROLES, 0))
    host_peak_bytes: int = 0
    host: dict[str, int] = field(default_factory=dict)
    disk_bytes: int = 0
    read_bytes: int = 0
    flops_forward: int = 0
    flops_backward: int = 0
    used: bool = True
    seconds: float | None = None

    @property
    def flops(self) -> int:
        """All work."""
        return self.flops_forward + self.flops_backward


@dataclass(frozen=True)
class Plan:
    """What a run takes.

    Args:
        model, device, dtype: names.
        split, num_blocks: the skipped blocks, of how many.
        settings: dotted keys on which the memory depends, with their values.
        phases: by name, in the order of ``PHASES``.
        remarks: sentences about what was assumed.
    """

    model: str
    device: str
    dtype: str
    split: tuple[int, int]
    num_blocks: int
    settings: dict[str, Any]
    phases: dict[str, PhasePlan]
    remarks: tuple[str, ...] = ()

    def used(self) -> dict[str, PhasePlan]:
        """The phases that the run has."""
        return {name: phase for name, phase in self.phases.items() if phase.used}

    @property
    def skipped_blocks(self) -> int:
        """Blocks that are not in memory while training, or only while they are run."""
        kept = {"skip.front_mode": self.split[0], "skip.tail_mode": self.split[1]}
        held = sum(count for key, count in kept.items() if self.settings.get(key) == "keep")
        return sum(self.split) - held + int(self.settings.get("skip.middle", 0))

    @property
    def device_peak_bytes(self) -> int:
        """Of the phase that needs most."""
        return max(phase.device_peak_bytes for phase in self.used().values())

    @property
    def host_peak_bytes(self) -> int:
        """Of the phase that needs most."""
        return max(phase.host_peak_bytes for phase in self.used().values())

    @property
    def disk_bytes(self) -> int:
        """Of all phases: what lies on disk at the end of training at most."""
        return sum(phase.disk_bytes for phase in self.used().values())

    def as_json(self) -> dict[str, Any]:
        """Plain values; ``from_json`` is the inverse."""
        document = dataclasses.asdict(self)
        document["split"] = list(self.split)
        document["remarks"] = list(self.remarks)
        for name, phase in self.phases.items():
            document["phases"][name]["flops"] = phase.flops
        totals = {"device_peak_bytes": self.device_peak_bytes, "host_peak_bytes": self.host_peak_bytes}
        return document | totals | {"disk_bytes": self.disk_bytes}

    @staticmethod
    def from_json(document: dict[str, Any]) -> Plan:
        """The plan of ``as_json``.

        Raises:
            KeyError, TypeError: it is none.
        """
        names = {item.name for item in dataclasses.fields(PhasePlan)}
        phases = {
            name: PhasePlan(**{key: value for key, value in phase.items() if key in names})
            for name, phase in document["phases"].items()
        }
        return Plan(
            document["model"], document["device"], document["dtype"], tuple(document["split"]), document["num_blocks"],
            document["settings"], phases, tuple(document["remarks"]),
        )  # fmt: skip


def counted(live: LiveBytes, **others: Any) -> PhasePlan:
    """A phase whose device memory is what was counted."""
    return PhasePlan(device_peak_bytes=live.device_peak, device=dict(live.device_split), **others)
