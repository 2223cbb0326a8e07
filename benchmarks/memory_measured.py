"""Planned memory beside what runs really take: every run is a process of its own, private and mapped memory together.

    python -m benchmarks.memory_measured                        both built-in models and SANA-0.6B
    python -m benchmarks.memory_measured --model builtin --markdown --json memory_measured.json

Runs are of 2 steps, with one preview. SANA-0.6B has random bfloat16 weights at the published sizes, at 256 px; its text
encoder is a small Gemma-2 of the right width instead of the published one with 2.6 billion parameters. A process holds
what its imports left (the baseline); planned figures are above it, so both are shown: above the baseline, and with it.

On CUDA a row has the device's figures too: tensors planned and allocated, what the allocator reserved, and what the
whole device had in use (``torch.cuda.mem_get_info``, sampled every 20 ms), other processes and the driver included.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import blockskip
from benchmarks.paper_memory import table
from benchmarks.random_models import write_sana
from blockskip import builtin
from blockskip.measure import INTERVAL, Meter, PhaseRecord
from blockskip.precision import resolve_device
from blockskip.progress import quiet
from blockskip.run.planned import peaks_of, plan_run
from blockskip.run.prepare import prepare
from blockskip.settings import from_flat

MIB = 2**20
SETTINGS: dict[str, Any] = {
    "data.prompt": "a photo of sks teapot", "train.steps": 2, "train.gradient_accumulation_steps": 2,
    "preview.prompts": ["a photo of sks teapot on the beach"], "preview.num_inference_steps": 2,
}  # fmt: skip
RANDOM = "SANA-0.6B"
#: What an accelerator's rows have besides.
DEVICE_HEADINGS = ("device planned", "allocated", "difference", "reserved", "device-wide")
_SIZES = ("data.resolution", "data.full_resolution", "preview.height", "preview.width")
#: Settings of each model beside those above.
MODELS: dict[str, dict[str, Any]] = {
    "builtin": {}, "builtin-sana": {}, RANDOM: {"model.dtype": "bfloat16"} | dict.fromkeys(_SIZES, 256),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A phase of a run; sizes are bytes, host sizes above the baseline.

    Args:
        planned, measured: host memory, private and mapped together; where device and host are one memory, of both.
        private, mapped: peaks of each, which need not come at the same moment.
        baseline: of the process before the run.
        device_planned, allocated, reserved: on an accelerator, else 0.
        device_wide: in use on the whole device at most; 0 where nobody tells.
        seconds: of the phase.
    """

    model: str
    phase: str
    planned: int
    measured: int
    private: int
    mapped: int
    baseline: int
    device_planned: int = 0
    allocated: int = 0
    reserved: int = 0
    device_wide: int = 0
    seconds: float = 0.0

    @property
    def difference(self) -> float:
        """Measured over planned, less one, above the baseline."""
        return self.measured / self.planned - 1

    @property
    def of_the_process(self) -> float:
        """The same of the whole process, baseline included."""
        return (self.measured + self.baseline) / (self.planned + self.baseline) - 1


def measure(model: str, values: Mapping[str, Any], device: str = "auto", apart: bool = False) -> list[Row]:
    """The phases of a run of a model, which is done in a process of its own.

    Args:
        model: what ``model.path`` takes.
        values: further dotted keys.
        apart: every phase is done in a process of its own, which goes on with the run and ends with the phase.

    Raises:
        subprocess.CalledProcessError: the run failed; it told why on its standard error.
    """
    with tempfile.TemporaryDirectory() as folder:
        settings = SETTINGS | {
            "model.path": model, "data.images": str(builtin.subject_path("teapot") / "train"),
            "output": str(Path(folder) / "out"), "train.device": device,
        } | dict(values)  # fmt: skip
        environment = os.environ | {"BLOCKSKIP_CACHE": str(Path(folder) / "cache")}
        with patch.dict(os.environ, environment), quiet():
            prepared = prepare(from_flat(settings))
            planned = peaks_of(plan_run(prepared))  # kept in the cache: a process that is measured plans nothing
            needless = set() if prepared.rule.stores(prepared.stored) else {"precompute"}
        rows: list[Row] = []
        for phase in [name for name in planned if name not in needless] if apart else [""]:
            command = [sys.executable, "-m", "benchmarks.memory_measured", "--run", json.dumps(settings)]
            command += ["--phase", phase] if phase else []
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
            rows += [Row(**row) for row in json.loads(done.stdout.splitlines()[-1])]
    return rows


class _Ended(BaseException):
    """The phase that was wanted is over; no ``Exception``, which a run would take for a failure of its own."""

    def __init__(self, record: PhaseRecord, baseline: int) -> None:
        self.record, self.baseline = record, baseline


@contextmanager
def _until(wanted: str) -> Iterator[None]:
    """Runs inside end with a phase, by ``_Ended``; with an empty name they go on to their end."""
    phase = Meter.phase

    @contextmanager
    def ending(meter: Meter, name: str) -> Iterator[None]:
        with phase(meter, name):
            yield
        if name == wanted and meter.last is not None:
            raise _Ended(meter.last, meter.baseline_bytes)

    with patch.object(Meter, "phase", ending):
        yield


def run(settings: Mapping[str, Any], phase: str = "") -> list[Row]:
    """The rows of a run in this process.

    Args:
        phase: goes on with the run and ends with this phase, whose row is the only one; default: all of them.
    """
    config = from_flat(dict(settings))
    device = resolve_device(config.train.device)
    with device_wide(device) as in_use, quiet(), _until(phase):
        try:
            result = blockskip.train(config)
            records, planned, baseline = result.records, result.planned, result.baseline_bytes
        except _Ended as ended:
            records, baseline, planned = [ended.record], ended.baseline, peaks_of(plan_run(prepare(config)))
    return [
        Row(
            config.model.path, one.name, planned[one.name].host, one.host_peak, one.host_private_peak,
            one.host_mapped_peak, baseline, planned[one.name].device, one.device_allocated_peak,
            one.device_reserved_peak, in_use.get(one.name, 0), one.seconds,
        )
        for one in records
    ]  # fmt: skip


@contextmanager
def device_wide(device: torch.device) -> Iterator[dict[str, int]]:
    """Bytes in use on a whole CUDA device at most, by the phase of the runs inside; empty for other devices."""
    peaks: dict[str, int] = {}
    if device.type != "cuda":
        yield peaks
        return
    current, phase = [""], Meter.phase

    @contextmanager
    def named(meter: Meter, name: str) -> Iterator[None]:
        before, current[0] = current[0], name
        try:
            with phase(meter, name):
                yield
        finally:
            current[0] = before

    done = threading.Event()

    def sample() -> None:
        while not done.wait(INTERVAL):
            free, total = torch.cuda.mem_get_info(device)
            peaks[current[0]] = max(peaks.get(current[0], 0), total - free)

    thread = threading.Thread(target=sample, daemon=True)
    with patch.object(Meter, "phase", named):
        thread.start()
        try:
            yield peaks
        finally:
            done.set()
            thread.join()


def cells_of(rows: Sequence[Row]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headings and cells of a table, MiB; with the columns of an accelerator where there is one."""
    headings = (
        "model", "phase", "planned", "measured", "difference", "private", "mapped", "whole process", "difference",
    )  # fmt: skip
    on_device = any(row.device_planned for row in rows)
    if on_device:
        headings += DEVICE_HEADINGS
    cells = []
    for number, row in enumerate(rows):
        first = not number or rows[number - 1].model != row.model
        line = [
            row.model if first else "", row.phase, mib(row.planned), mib(row.measured), f"{row.difference:+.0%}",
            mib(row.private), mib(row.mapped), mib(row.measured + row.baseline), f"{row.of_the_process:+.0%}",
        ]  # fmt: skip
        cells.append((*line, *(device_cells(row) if on_device else ())))
    return headings, cells


def device_cells(row: Row) -> tuple[str, ...]:
    """The cells below ``DEVICE_HEADINGS``, MiB."""
    share = f"{row.allocated / row.device_planned - 1:+.0%}" if row.device_planned else "–"
    wide = mib(row.device_wide) if row.device_wide else "–"
    return mib(row.device_planned), mib(row.allocated), share, mib(row.reserved), wide


def mib(size: int) -> str:
    """A size in MiB."""
    return f"{size / MIB:.0f}"


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Print the table; returns its rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_measured", description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", default=list(MODELS), help="names of these, or folders of pipelines")
    parser.add_argument("--device", default="auto", help="where the runs compute")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further settings, values as JSON")
    parser.add_argument("--markdown", action="store_true", help="print the table as docs/memory.md has it")
    parser.add_argument("--json", type=Path, help="file for all figures, bytes")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--phase", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.run:
        rows = run(json.loads(options.run), options.phase)
        print(json.dumps([asdict(row) for row in rows]))
        return rows
    further = {key: json.loads(value) for key, _, value in (item.partition("=") for item in options.set)}
    rows = []
    for model in options.model:
        with tempfile.TemporaryDirectory() as folder:
            path = str(write_sana(Path(folder))) if model == RANDOM else model
            found = measure(path, MODELS.get(model, {}) | further, options.device)
        rows += [Row(**(asdict(row) | {"model": Path(model).name})) for row in found]
    headings, cells = cells_of(rows)
    print(table(headings, cells, options.markdown))
    print(f"\nMiB. Baseline: {', '.join(f'{name} {mib(size)}' for name, size in baselines(rows).items())}.")
    if options.json:
        document = [asdict(row) | {"difference": row.difference} for row in rows]
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return rows


def baselines(rows: Sequence[Row]) -> dict[str, int]:
    """What each model's process held before its run, in bytes."""
    return {row.model: row.baseline for row in rows}


if __name__ == "__main__":
    main()
