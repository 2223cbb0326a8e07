"""Plans as tables for the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

from blockskip.planner.compare import Compared
from blockskip.planner.counting import DEVICE_ROLES
from blockskip.planner.plan import PhasePlan, Plan
from blockskip.units import duration, size, work

WIDTH = 100
NONE = "-"
#: What the roles of device memory are called.
ROLES = {role: role for role in DEVICE_ROLES} | {"optimizer": "optimiser"}
NOTE = (
    "Device memory: tensors at their highest moment, without what the driver and the allocator keep beside them. Host "
    "memory: above the process after its imports. Work: floating-point operations, a multiply-add counts as two."
)


def render_plan(plan: Plan) -> str:
    """A heading, one column a phase, the highest figures, and the remarks; no line is wider than 100 columns."""
    phases = {name: phase for name, phase in plan.phases.items() if phase.used or name == "preview"}
    columns = list(phases.values())

    def row(label: str, figure: Callable[[PhasePlan], int], text: Callable[[int], str] = size) -> list[str]:
        values = [figure(phase) for phase in columns]
        return [label, *(text(value) if value else NONE for value in values)]

    rows = [row("Device memory", lambda phase: phase.device_peak_bytes)]
    rows += [row(f"  {ROLES[role]}", lambda phase, role=role: phase.device[role]) for role in DEVICE_ROLES]  # type: ignore[misc]
    rows += [
        row("Host memory", lambda phase: phase.host_peak_bytes),
        row("Disk written", lambda phase: phase.disk_bytes),
        row("Disk read", lambda phase: phase.read_bytes),
        row("Work forward", lambda phase: phase.flops_forward, work),
        row("Work backward", lambda phase: phase.flops_backward, work),
    ]
    if any(phase.seconds is not None for phase in columns):
        times = [NONE if phase.seconds is None else duration(phase.seconds) for phase in columns]
        rows.append(["Time, estimated", *times])
    header = ["", *(name if phase.used else f"({name})" for name, phase in phases.items())]
    lines = [*wrapped(heading(plan)), "", *aligned(header, rows), ""]
    for label, figure in (
        ("Device memory", lambda phase: phase.device_peak_bytes), ("Host memory", lambda phase: phase.host_peak_bytes),
    ):  # fmt: skip
        name, phase = max(plan.used().items(), key=lambda item: figure(item[1]))
        lines.append(f"{label} at most: {size(figure(phase))}, in {name}")
    lines.append(f"Disk at most: {size(plan.disk_bytes)}")
    remarks = list(plan.remarks)
    if not phases["preview"].used:
        remarks.append("The run draws no previews (preview.prompts); in brackets, what one picture would take.")
    return "\n".join([*lines, "", *(line for text in (*remarks, NOTE) for line in wrapped(text))]) + "\n"


def render_comparison(rows: Sequence[Compared]) -> str:
    """One column a setting: memory of the device while training by role, and what the whole run takes.

    The setting that was asked for is marked.
    """
    first = rows[0].plan
    lines = [
        *wrapped(f"{first.model} on {first.device} in {base_of(first)}, LoRA rank {first.settings['lora.rank']}, "
               f"{steps_of(first)}: plain LoRA beside skipped blocks"), "",
    ]  # fmt: skip
    plans = [row.plan for row in rows]
    table = [["Training, device", *(size(plan.phases["train"].device_peak_bytes) for plan in plans)]]
    for role in DEVICE_ROLES:
        values = [plan.phases["train"].device[role] for plan in plans]
        table.append([f"  {ROLES[role]}", *(size(value) if value else NONE for value in values)])
    table += [
        ["Any phase, device", *(size(plan.device_peak_bytes) for plan in plans)],
        ["Any phase, host", *(size(plan.host_peak_bytes) for plan in plans)],
        ["Disk written", *(size(plan.disk_bytes) for plan in plans)],
        ["Work, training", *(f"{_work(plan, 'train') / _work(plans[0]):.2f}" for plan in plans)],
        ["Work, all", *(f"{_work(plan) / _work(plans[0]):.2f}" for plan in plans)],
    ]
    seconds = [[plan.phases[name].seconds for name in ("precompute", "train")] for plan in plans]
    if any(value is not None for pair in seconds for value in pair):
        table.append(["Time, estimated", *(duration(sum(value or 0 for value in pair)) for pair in seconds)])
    names = [_lines(row.name, row.chosen) for row in rows]
    lines += aligned(["", *(name[0] for name in names)], table, ["", *(name[1] for name in names)])
    lines.append("")
    if any(row.chosen for row in rows):
        lines.append("* the setting that was asked for")
    lines += wrapped("Work: of all phases but previews, as a share of plain LoRA's at full resolution.")
    remarks = dict.fromkeys(remark for plan in plans for remark in plan.remarks)
    return "\n".join([*lines, *(line for text in (*remarks, NOTE) for line in wrapped(text))]) + "\n"


def base_of(plan: Plan) -> str:
    """How the weights are kept, and whether activations are computed again."""
    quantized, again = plan.settings["model.quantization"], plan.settings["train.gradient_checkpointing"]
    base = plan.dtype if quantized == "none" else f"{plan.dtype}, trained blocks in {quantized}"
    return f"{base}, with gradient checkpointing" if again else base


def heading(plan: Plan) -> str:
    """What the plan is for, in a line or two."""
    settings, (front, tail) = plan.settings, plan.split
    at_front, at_tail = (", kept" if settings[f"skip.{end}_mode"] == "keep" else "" for end in ("front", "tail"))
    where = f"{front} front{at_front}, {tail} tail{at_tail}"
    if settings["skip.middle"]:
        where = "in the middle"
    skipped = "no block skipped"
    if front + tail or settings["skip.middle"]:
        skipped = f"{plan.skipped_blocks} of {plan.num_blocks} blocks skipped ({where})"
    trained = f"LoRA rank {settings['lora.rank']}"
    if settings["train.lisa_blocks"]:
        trained = f"LISA with {settings['train.lisa_blocks']} blocks at a time"
    return (
        f"{plan.model} on {plan.device} in {base_of(plan)}: {settings['data.resolution']} px of "
        f"{settings['data.full_resolution']}, {skipped}, {trained}, "
        f"{steps_of(plan)}"
    )


def steps_of(plan: Plan) -> str:
    """``500 steps of 4 samples``."""
    samples = plan.settings["train.batch_size"] * plan.settings["train.gradient_accumulation_steps"]
    return f"{plan.settings['train.steps']} steps of {samples} sample{'s' if samples > 1 else ''}"


def _work(plan: Plan, *names: str) -> int:
    return sum(phase.flops for name, phase in plan.used().items() if name in names or (not names and name != "preview"))


def _lines(name: str, chosen: bool) -> tuple[str, str]:
    start, _, end = name.rpartition(", ")
    return start + (" *" if chosen else ""), end


def wrapped(text: str) -> list[str]:
    """Lines of at most 100 columns."""
    return textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def aligned(header: list[str], rows: list[list[str]], second: list[str] | None = None) -> list[str]:
    """Aligned lines: labels to the left, figures to the right, a rule below the header."""
    heads = [header] if second is None else [header, second]
    widths = [max(len(row[column]) for row in (*heads, *rows)) for column in range(len(header))]

    def line(cells: list[str]) -> str:
        padded = [cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))]
        return "  ".join(padded).rstrip()

    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    return [*map(line, heads), rule, *map(line, rows)]
