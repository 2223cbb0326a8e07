"""What makes a phase smaller: the settings that are left to try, those first with which the same run goes on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from blockskip.loading.ahead import reads_ahead
from blockskip.planner.budget import LOWEST_RESOLUTION, RATIOS, WINDOWS
from blockskip.planner.plan import Plan
from blockskip.preview.draw import Drawing
from blockskip.run.prepare import Prepared, may_change
from blockskip.settings import SHORT, size_in_bytes

#: What stands for the disk where phases are named.
DISK = "disk"
#: What helps whatever the settings are.
LAST = (
    "close other programs that take memory, or use a machine with more",
    "a smaller base model, or one whose weights are stored in fewer bytes",
    "smaller pictures, and fewer at once",
)


@dataclass(frozen=True)
class Try:
    """Settings to try, by their dotted keys."""

    values: dict[str, Any]

    @property
    def continues(self) -> bool:
        """Whether the run goes on with them in the same output folder."""
        return all(may_change(name) for name in self.values)

    def __str__(self) -> str:
        options = " ".join(map(as_option, self.values, self.values.values()))
        return options if self.continues else f"{options} (in another output folder)"


def as_option(name: str, value: Any) -> str:
    """``--train.gradient-checkpointing``, ``--skip 0.5``: a setting as the command line takes it."""
    if value is False:
        return f"--no-{name.replace('_', '-')}"
    short = next((short for short, full in SHORT.items() if full == name), name.replace("_", "-"))
    return f"--{short}" if value is True else f"--{short} {value}"


def advice(prepared: Prepared, plan: Plan | None, phase: str) -> str:
    """The first two things to try for a phase or ``DISK``, as part of a sentence.

    Args:
        plan: of the run, where there is one.
    """
    if phase == DISK:
        return f"{'a' if prepared.disk_bytes is None else 'a smaller'} --features.disk, or fewer checkpoints"
    return " or ".join([*map(str, tries(prepared, phase, plan)), *LAST][:2])


def tries(prepared: Prepared, phase: str, plan: Plan | None = None, *, on_device: bool = False) -> list[Try]:
    """What makes a phase smaller and is not set yet.

    Args:
        plan: of the run; it tells what a smaller window would change.
        on_device: it is the accelerator's own memory that was too small.
    """
    found = [Try(values) for values in _candidates(prepared, phase, plan, on_device)]
    return sorted(found, key=lambda item: not item.continues)


def _candidates(prepared: Prepared, phase: str, plan: Plan | None, on_device: bool) -> Iterator[dict[str, Any]]:
    config = prepared.config
    if phase == "preview":
        yield from _of_preview(prepared)
    if phase in ("encode text", "preview") and not config.model.stream_text_encoders:
        yield {"model.stream_text_encoders": True}
    if on_device and config.model.read_ahead and _second_block(prepared, phase):
        yield {"model.read_ahead": False}
    if phase == "precompute" and not on_device and config.features.window_on == "memory":
        now = size_in_bytes("features.window", config.features.window)
        used = plan.phases["precompute"].host.get("window of states", now) if plan else now
        smaller = [window for window in WINDOWS if size_in_bytes("", window) < min(now, used)]
        if smaller:
            yield {"features.window": smaller[0]}
            yield {"features.window_on": "disk"}
    if phase == "train":
        yield from _of_training(prepared)
    if phase in ("encode pictures", "precompute", "train"):
        yield from _of_samples(prepared)
    longest = max(len(caption.encode()) for caption in prepared.schedule.captions()) // 2 + 8
    shorter = [length for length in (256, 128) if longest <= length < prepared.text_length]
    if shorter and phase in ("encode text", "precompute", "train"):
        yield {"data.text_length": shorter[0]}
    if phase != "preview" and config.model.dtype == "float32":
        yield {"model.dtype": "bfloat16"}


def _second_block(prepared: Prepared, phase: str) -> bool:
    """Whether a block is copied to the device in a phase while another one computes."""
    visits = {
        "precompute": True, "train": bool(prepared.streamed), "preview": prepared.config.preview.stream,
    }  # fmt: skip
    return reads_ahead(prepared.device) and visits.get(phase, False)


def _of_preview(prepared: Prepared) -> Iterator[dict[str, Any]]:
    preview, stride = prepared.config.preview, prepared.source.pixel_stride
    if not preview.stream:
        yield {"preview.stream": True}
    if preview.batch_size > 1:
        yield {"preview.batch_size": 1}
    height, width = Drawing((), height=preview.height, width=preview.width).size(prepared.source)
    if min(height, width) >= 2 * stride:
        yield {"preview.height": height // 2 // stride * stride, "preview.width": width // 2 // stride * stride}


def _of_training(prepared: Prepared) -> Iterator[dict[str, Any]]:
    config = prepared.config
    if not config.train.gradient_checkpointing:
        yield {"train.gradient_checkpointing": True}
    if config.train.lisa_blocks:
        if config.train.lisa_blocks > 1:
            yield {"train.lisa_blocks": config.train.lisa_blocks // 2}
        return
    if not config.train.stream_middle:
        packed = config.model.quantization != "none"
        yield {"train.stream_middle": True} | ({"model.quantization": "none"} if packed else {})
        if config.model.quantization != "nf4":
            yield {"model.quantization": "nf4" if packed else "int8"}
    larger = [ratio for ratio in RATIOS if ratio > config.skip.ratio]
    if larger and config.skip.front is None and config.skip.tail is None and not config.skip.middle:
        yield {"skip.ratio": larger[0]}


def _of_samples(prepared: Prepared) -> Iterator[dict[str, Any]]:
    data, train = prepared.config.data, prepared.config.train
    if train.batch_size > 1:  # as many samples a step as before
        several = train.batch_size * train.gradient_accumulation_steps
        half = max(size for size in range(1, train.batch_size) if not several % size and size <= train.batch_size / 2)
        yield {"train.batch_size": half, "train.gradient_accumulation_steps": several // half}
    if data.resolution is not None and data.resolution // 2 >= LOWEST_RESOLUTION:
        yield {"data.resolution": data.resolution // 2}
