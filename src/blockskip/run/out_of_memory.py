"""What is told when memory runs out, on one screen: the phase, planned and measured, what is safe, what to try next."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch

from blockskip.errors import OutOfMemory
from blockskip.loading.source import ModelSource
from blockskip.measure import Meter, Peaks, PhaseRecord
from blockskip.memory import asked_bytes, free_memory, let_go, process_limit
from blockskip.planner.make import make_plan
from blockskip.planner.plan import Plan
from blockskip.preview.draw import Drawing
from blockskip.run.advice import LAST, Try, tries
from blockskip.run.large import plan_drawing
from blockskip.run.planned import POOLS, budget_of, peaks_of, setting_of
from blockskip.run.prepare import Prepared
from blockskip.training.checkpoints import latest_checkpoint
from blockskip.units import size

#: What is named to try, and seconds after which nothing more is planned for it.
SHOWN, PATIENCE = 3, 20.0

T = TypeVar("T")


def run_failed(
    error: BaseException, prepared: Prepared, meter: Meter, planned: Mapping[str, Peaks], plan: Plan | None
) -> OutOfMemory:
    """The error of a run that has no memory left. What the phase held is let go of first.

    Args:
        meter: its last phase is the one that failed.
        planned: peaks by phase, from before the run.
        plan: of the run, if it could be planned.
    """
    phase, on_device = meter.latest, _on_device(error, prepared.device)
    state = _state(error, phase, prepared.device, on_device, planned.get(phase), meter.last)
    allowed = budget_of(prepared.config, prepared.device)
    bound = allowed.device if on_device else allowed.host
    if bound is not None:
        state["budget"] = size(bound)
    let_go(error)
    state["checkpoint"] = _checkpoint(prepared)

    def peak(item: Try) -> int:
        peaks = peaks_of(make_plan(setting_of(prepared, item.values), previews=False))[phase]
        return peaks.device if on_device else peaks.host

    before = planned.get(phase)
    figure = None if before is None else before.device if on_device else before.host
    shown = _shown(tries(prepared, phase, plan, on_device=on_device), peak, figure)
    return OutOfMemory(screen(state, "Try next; the same command goes on from there:", shown))


def drawing_failed(
    error: BaseException, source: ModelSource, drawing: Drawing, dtype: torch.dtype, device: torch.device, meter: Meter
) -> OutOfMemory:
    """The error of ``generate`` when there is no memory left."""
    on_device = _on_device(error, device)
    state = _state(error, "generate", device, on_device, None, meter.last)
    let_go(error)

    def peak(values: Mapping[str, Any]) -> int:
        given = {name: value for name, value in values.items() if name != "dtype"}
        plan = plan_drawing(source, dataclasses.replace(drawing, **given), values.get("dtype", dtype), device)
        return plan.device_peak_bytes if on_device else plan.host_peak_bytes

    figure: int | None = None
    with contextlib.suppress(Exception):
        figure = peak({})
        state = {name: size(figure) if name == "planned" else text for name, text in state.items()}
    options: dict[str, Mapping[str, Any]] = {}
    height, width = drawing.size(source)
    stride = source.pixel_stride
    if not drawing.stream:
        options["--stream"] = {"stream": True}
    if drawing.batch_size > 1:
        options["--batch-size 1"] = {"batch_size": 1}
    if min(height, width) >= 2 * stride:
        half = {"height": height // 2 // stride * stride, "width": width // 2 // stride * stride}
        options[f"--height {half['height']} --width {half['width']}"] = half
    if dtype == torch.float32:
        options["--dtype bfloat16"] = {"dtype": torch.bfloat16}
    shown = _shown(list(options), lambda option: peak(options[option]), figure)
    return OutOfMemory(screen(state, "Try next:", shown))


def screen(state: Mapping[str, str], heading: str, shown: Iterable[str]) -> str:
    """The text: what is known, a line each, and what to try, numbered."""
    rest = dict(state)
    lines = [f'Out of memory in the phase "{rest.pop("phase")}".']
    lines += [f"  {name:<11} {text}" for name, text in rest.items()]
    return "\n".join([*lines, heading, *(f"  {number}. {text}" for number, text in enumerate(shown, 1))])


def _state(
    error: BaseException, phase: str, device: torch.device, on_device: bool, planned: Peaks | None,
    record: PhaseRecord | None,
) -> dict[str, str]:  # fmt: skip
    """The first lines of the screen; read while everything that filled the memory is still there."""
    kind = "device memory" if on_device else "memory" if device.type in POOLS else "host memory"
    figure = None if planned is None else planned.device if on_device else planned.host
    state = {"phase": phase, "planned": "unknown" if figure is None else f"{size(figure)} of {kind}"}
    measured = "nothing yet"
    if record is not None and record.name == phase:
        measured = size(record.device_allocated_peak if on_device else record.host_peak) + " at most"
        measured += f" ({size(record.device_reserved_peak)} reserved)" if on_device else ""
    asked = asked_bytes(error)
    state["measured"] = measured + (f", when {size(asked)} more was asked for" if asked else "")
    free = free_memory(device if on_device else torch.device("cpu"))
    if free is not None:
        state["free"] = f"{size(free[0])} of {size(free[1])} on {'the device' if on_device else 'this machine'}"
        limit = process_limit()
        if limit is not None and not on_device:
            state["free"] += f"; this process may take {size(limit)} (ulimit -v)"
    return state


def _checkpoint(prepared: Prepared) -> str:
    with contextlib.suppress(Exception):
        found = latest_checkpoint(prepared.output / "checkpoints")
        if found is None:
            return "none yet; what was encoded and precomputed is kept"
        folder = prepared.output / "checkpoints" / f"step-{found.step:06d}"
        return f'"{folder}" is whole: {found.step} of {prepared.config.train.steps} steps'
    return f'the last one in "{prepared.output / "checkpoints"}" is whole'


def _shown(options: list[T], peak: Callable[[T], int], before: int | None) -> list[str]:
    """What to try: with planned peaks where they can be had; without what the plan says to be of no use."""
    found: list[str] = []
    began = time.monotonic()
    for number, option in enumerate(options):
        figure: int | None = None
        if number < SHOWN and time.monotonic() - began < PATIENCE:
            with contextlib.suppress(Exception):
                figure = peak(option)
        if figure is None:
            found.append(str(option))
        elif before is None or figure < before:
            found.append(f"{option}: {size(figure)} planned")
    return [*found, *LAST][:SHOWN]


def _on_device(error: BaseException, device: torch.device) -> bool:
    """Whether it is the accelerator's own memory that ran out."""
    return device.type not in POOLS and not isinstance(error, (MemoryError, OSError)) and "CPU" not in str(error)
