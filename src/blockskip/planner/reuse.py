"""Phases that several plans of one process share: where one setting is changed after another, most stay the same.

What a phase does not depend on is named here; everything else is part of what it is known by, new settings too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from blockskip.planner.setting import Setting
from blockskip.settings import to_flat

Result = TypeVar("Result")

#: Settings that do not change what a run takes.
WITHOUT_WEIGHT = (
    "output",
    "data.images",
    "data.prompt",
    "data.class_images",
    "data.class_prompt",
    "features.cache",
    "model.path",
)
#: Settings, or sections with a dot, that a phase does not depend on.
INDEPENDENT = {
    "encode text": (
        "size", "groups", "captions", "data.resolution", "data.full_resolution", "model.quantization",
        "model.read_ahead", "patches.", "skip.", "lora.", "train.", "features.", "preview.",
    ),
    "encode pictures": (
        "captions", "data.text_length", "model.quantization", "model.stream_text_encoders", "model.read_ahead",
        "skip.", "lora.",
        "train.gradient_checkpointing", "train.stream_middle", "features.", "preview.",
    ),
    "precompute": (
        "model.quantization", "model.stream_text_encoders", "lora.", "train.gradient_checkpointing",
        "train.stream_middle", "preview.seed", "preview.images", "preview.num_inference_steps",
        "preview.guidance_scale", "preview.height", "preview.width", "preview.batch_size", "preview.stream",
    ),
    "train": ("model.stream_text_encoders", "features.window", "features.window_on", "features.disk", "preview."),
    "preview": (
        "size", "groups", "captions", "data.resolution", "model.quantization", "patches.",
        "train.gradient_checkpointing", "train.stream_middle", "features.",
    ),
}  # fmt: skip
_known: dict[tuple[object, ...], Any] = {}


def shared(phase: str, setting: Setting, count: Callable[[], Result]) -> Result:
    """What ``count`` returns, or returned for this phase of a setting that differs in nothing the phase depends on."""
    values = to_flat(setting.config) | {
        "size": setting.size, "groups": setting.groups, "captions": setting.captions,
        "reference": setting.reference, "rule": type(setting.rule),
    }  # fmt: skip
    without = {*WITHOUT_WEIGHT, "memory.", *INDEPENDENT[phase]}
    own = {name: value for name, value in values.items() if not without & {name, name.partition(".")[0] + "."}}
    key = (phase, str(setting.source.folder), setting.device.type, setting.dtype, *own.items())
    if key not in _known:
        _known[key] = count()
    return _known[key]  # type: ignore[no-any-return]


def forget() -> None:
    """Count every phase anew from now on."""
    _known.clear()
