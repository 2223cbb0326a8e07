"""Whether a model and a machine can draw what is asked for; told ahead, as a system without memory kills or stalls."""

from __future__ import annotations

import contextlib

import psutil
import torch

from blockskip.config import Config
from blockskip.errors import UserError
from blockskip.loading.source import ModelSource
from blockskip.memory import free_memory
from blockskip.planner.encoding import text_encoders
from blockskip.planner.plan import PhasePlan
from blockskip.planner.previews import preview
from blockskip.planner.setting import make_setting
from blockskip.precision import resolve_dtype
from blockskip.preview.draw import Drawing
from blockskip.settings import from_flat
from blockskip.units import size

#: Pixels beyond which pictures are planned: four times those that the largest models are made for.
LARGE = 2048 * 2048


def plan_drawing(source: ModelSource, drawing: Drawing, dtype: torch.dtype, device: torch.device) -> PhasePlan:
    """What drawing takes on a device, which need not be there."""
    values = {
        "model.dtype": str(dtype).removeprefix("torch."), "model.stream_text_encoders": drawing.stream,
        "data.text_length": drawing.text_length, "preview.prompts": list(drawing.prompts),
        "preview.images": len(drawing.seeds), "preview.height": drawing.height, "preview.width": drawing.width,
        "preview.num_inference_steps": drawing.steps, "preview.guidance_scale": drawing.guidance_scale,
        "preview.batch_size": drawing.batch_size, "preview.stream": drawing.stream,
        "model.read_ahead": drawing.read_ahead,
    }  # fmt: skip
    setting = make_setting(source, from_flat(values), torch.device(device.type), captions=len(drawing.prompts))
    return preview(setting, *text_encoders(setting))


def preview_drawing(config: Config, text_length: int | None) -> Drawing:
    """What the previews of a run are."""
    preview = config.preview
    return Drawing(
        preview.prompts, tuple(preview.seed + number for number in range(preview.images)), preview.height,
        preview.width, preview.num_inference_steps, preview.guidance_scale, text_length, preview.stream,
        preview.batch_size, config.model.read_ahead,
    )  # fmt: skip


def check_previews(config: Config, source: ModelSource, device: torch.device) -> None:
    """See that the previews of a run can be drawn.

    Raises:
        UserError: they cannot.
    """
    drawing = preview_drawing(config, config.data.text_length)
    check_drawing(source, drawing, resolve_dtype(config.model.dtype, device), device, "preview.")


def check_drawing(
    source: ModelSource, drawing: Drawing, dtype: torch.dtype, device: torch.device, section: str = ""
) -> None:
    """See that pictures can be drawn; such that are very large must fit into what memory there is, used or not.

    Args:
        section: put before the names of settings in the sentence of an error.

    Raises:
        UserError: of ``Drawing.check``; or they do not.
    """
    height, width = drawing.check(source, section)
    if height * width <= LARGE:
        return
    plan: PhasePlan | None = None
    with contextlib.suppress(Exception):  # whatever it is: then it is tried
        plan = plan_drawing(source, drawing, dtype, device)
    if plan is None:
        return
    needed = {"this machine": (plan.host_peak_bytes, psutil.virtual_memory().total + psutil.swap_memory().total)}
    if device.type == "cuda" and (memory := free_memory(device)) is not None:  # others share the host's
        needed["the device"] = plan.device_peak_bytes, memory[1]
    advice = "take a smaller picture" if drawing.stream else f"take a smaller picture, or set {section}stream"
    for place, (planned, there) in needed.items():
        if planned > there:
            raise UserError(
                f"{section}height = {height} and {section}width = {width} take {size(planned)} of memory, by the plan, "
                f"and {place} has {size(there)}; {advice}."
            )
