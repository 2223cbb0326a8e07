"""Runs of models at their published sizes, with random weights: memory of each phase, planned and measured, and time.

    python -m benchmarks.real_size                                  all of it: an hour or two on two cores, no GPU
    python -m benchmarks.real_size --model sana-0.6b --keep build   its runs; the checkpoint stays, for other calls
    python -m benchmarks.real_size --update                         writes real_size.json, and docs/memory.md's table

Checkpoints are those of ``tools.make_random_checkpoint``: bfloat16, transformer and autoencoder of the published sizes,
a small text encoder of the published width. One for which the disk is too small is left out, with a sentence. Runs are
ordinary ones, each phase in a process of its own that goes on where the one before ended: ``memory.return_freed`` as
with a budget, 2 optimiser steps of 1 sample, text encoders and previews streamed. Memory is private and mapped
together, above the process after its imports, in GiB. Seconds are a phase's whole time, with the reading of its
weights, over its samples, captions or pictures. On CUDA there are the device's columns too, in MiB: tensors planned and
allocated, what the allocator reserved, the whole device.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.memory_measured import DEVICE_HEADINGS, Row, device_cells, measure
from benchmarks.paper_memory import table
from blockskip.units import size as in_units
from tools.make_random_checkpoint import checkpoint_bytes, write_checkpoint

FILE = Path(__file__).with_suffix(".json")
DOCUMENT = Path(__file__).parent.parent / "docs" / "memory.md"
BEGIN, END = "<!-- real_size -->\n", "\n<!-- /real_size -->"
GIB = 2**30
#: What a run writes beside the checkpoint, and some air.
SPARE = 6 * GIB
STEPS = 2
SETTINGS: dict[str, Any] = {
    "model.dtype": "bfloat16", "model.stream_text_encoders": True, "memory.return_freed": True, "train.steps": STEPS,
    "train.gradient_accumulation_steps": 1, "preview.prompts": [], "preview.stream": True,
    "preview.num_inference_steps": 2,
}  # fmt: skip
PLAIN = {"skip.front": 0, "skip.tail": 0}
PREVIEW = ["a photo of sks teapot on the beach"]
WINDOW = "50%, 512, window of 64 MiB full"
STREAMED = "50%, 256, streamed middle"
_HALF = {"skip.ratio": 0.5, "data.resolution": 512}


@dataclass(frozen=True)
class Run:
    """Settings of a run, and the phases that the table shows of it: those that are like another run's are left out."""

    values: Mapping[str, Any]
    shown: tuple[str, ...] = ("encode text", "encode pictures", "precompute", "train", "preview")


def _drawn(side: int) -> dict[str, Any]:
    return {"preview.prompts": PREVIEW, "preview.height": side, "preview.width": side}


_SANA = {
    "plain LoRA, 1024": Run(PLAIN | {"data.resolution": 1024}, ("encode pictures", "train")),
    "plain LoRA, 512": Run(PLAIN | {"data.resolution": 512, "data.full_resolution": 512}, ("train",)),
    "50%, 512": Run(_HALF | _drawn(512)),
    "50%, 512, tail streamed": Run(_HALF | {"skip.tail_mode": "stream"}, ("precompute", "train")),
    "50%, 512, int8": Run(_HALF | {"model.quantization": "int8"}, ("train",)),
    "50%, 512, NF4": Run(_HALF | {"model.quantization": "nf4"}, ("train",)),
    "50%, 512, preview at 1024": Run(_HALF | _drawn(1024), ("preview",)),
}
_FULL = Run(_HALF | {"features.window": "64MiB", "train.steps": 16}, ("precompute", "train"))
#: Runs by model and name.
RUNS: dict[str, dict[str, Run]] = {
    "sana-0.6b": _SANA | {WINDOW: _FULL},
    "sana-1.6b": _SANA,
    "flux": {STREAMED: Run({"skip.ratio": 0.5, "data.resolution": 256, "train.stream_middle": True})},
}


@dataclass(frozen=True)
class Target:
    """Bytes that phases of a run may take at most."""

    model: str
    run: str
    phases: tuple[str, ...]
    limit: int


TARGETS = (
    Target("sana-0.6b", "50%, 512", _SANA["50%, 512"].shown, int(1.2 * GIB)),
    Target("sana-0.6b", WINDOW, ("precompute", "train"), int(1.2 * GIB)),
    Target("flux", STREAMED, ("precompute",), 4 * GIB),
)


@dataclass(frozen=True)
class Line:
    """A phase of a run.

    Args:
        samples: or captions, or pictures, that the phase had.
    """

    model: str
    run: str
    samples: int
    row: Row


def measured(model: str, name: str, folder: Path, device: str, further: Mapping[str, Any]) -> list[Line]:
    """The phases of a run of a model.

    Args:
        folder: with the model's checkpoint.
        further: dotted keys over those of the run.
    """
    values = SETTINGS | RUNS[model][name].values | further
    samples = values["train.steps"] * values["train.gradient_accumulation_steps"]
    counts = {"encode text": 1, "preview": len(values["preview.prompts"])}
    rows = measure(str(folder), values, device, apart=True)
    return [Line(model, name, counts.get(row.phase, samples), replace(row, model=model)) for row in rows]


@contextmanager
def checkpoint(model: str, keep: Path | None) -> Iterator[Path | None]:
    """The folder of a model's checkpoint, made if need be; None, and a sentence, where the disk is too small for it.

    Args:
        keep: the folder that it stays in; None: it is removed.
    """
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary) if keep is None else keep
        folder, needed = place / model, SPARE
        whole = (folder / "model_index.json").is_file()
        if not whole and folder.exists():
            raise SystemExit(f'"{folder}" is not a checkpoint of {model}; give --keep another folder.')
        if not whole:
            needed += checkpoint_bytes(model)
            place.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(place).free
        if free < needed:
            print(f'{model} is left out: it takes {in_units(needed)} and the disk of "{place}" has {in_units(free)}.')
            yield None
            return
        if not whole:
            begun = place / f"{model}.part"
            shutil.rmtree(begun, ignore_errors=True)  # an interrupted one
            write_checkpoint(model, begun).rename(folder)
        yield folder


def cells_of(lines: Sequence[Line]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headings and cells of the table, GiB, the device's columns MiB."""
    headings: tuple[str, ...] = (
        "model", "run", "phase", "planned", "measured", "difference", "private", "mapped", "seconds",
    )  # fmt: skip
    on_device = any(line.row.device_planned for line in lines)
    cells, before = [], ("", "")
    for line in lines:
        row = line.row
        if row.phase not in RUNS[line.model][line.run].shown:
            continue
        cells.append((
            line.model if line.model != before[0] else "", line.run if (line.model, line.run) != before else "",
            row.phase, _gib(row.planned), _gib(row.measured), f"{row.difference:+.0%}", _gib(row.private),
            _gib(row.mapped), f"{row.seconds / line.samples:.1f}", *(device_cells(row) if on_device else ()),
        ))  # fmt: skip
        before = line.model, line.run
    return headings + DEVICE_HEADINGS * on_device, cells


def verdicts(lines: Sequence[Line]) -> list[str]:
    """A sentence for each target whose run is there: what was measured, and whether that is within it."""
    found = []
    for target in TARGETS:
        peaks = {
            line.row.phase: line.row.measured for line in lines
            if (line.model, line.run) == (target.model, target.run) and line.row.phase in target.phases
        }  # fmt: skip
        if not peaks:
            continue
        missed = [phase for phase in target.phases if peaks.get(phase, target.limit + 1) > target.limit]
        figures = ", ".join(f"{phase} {_gib(peak)}" for phase, peak in peaks.items())
        verdict = f"not met in {', '.join(missed)}" if missed else "met"
        found.append(f"{target.model}, {target.run}, at most {_gib(target.limit)} GiB: {figures}: {verdict}.")
    return found


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


def read(file: Path = FILE) -> list[Line]:
    """The lines on record; none where there is no file."""
    entries = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
    return [Line(**(entry | {"row": Row(**entry["row"])})) for entry in entries]


def merged(old: Sequence[Line], new: Sequence[Line]) -> list[Line]:
    """Both in the order of ``RUNS``; of a run that is in both, the new lines."""
    anew = {(line.model, line.run) for line in new}
    kept = [line for line in old if (line.model, line.run) not in anew]
    order = [(model, run) for model, runs in RUNS.items() for run in runs]
    return sorted([*kept, *new], key=lambda line: order.index((line.model, line.run)))


def text_of(lines: Sequence[Line], markdown: bool) -> str:
    """The table, and below it what has become of the targets."""
    return "\n".join([table(*cells_of(lines), markdown), "", *verdicts(lines)])


def in_document(document: str, text: str) -> str:
    """The document with a text between its marks.

    Raises:
        ValueError: the marks are not there.
    """
    start = document.index(BEGIN) + len(BEGIN)
    return document[:start] + text + document[document.index(END, start) :]


def write(lines: Sequence[Line], file: Path, document: Path) -> None:
    """The record, and the table that is made of it."""
    file.write_text(json.dumps([asdict(line) for line in lines], indent=1) + "\n", encoding="utf-8")
    text = in_document(document.read_text(encoding="utf-8"), text_of(lines, markdown=True))
    document.write_text(text, encoding="utf-8", newline="\n")


def main(arguments: Sequence[str] | None = None) -> list[Line]:
    """Measure and print the table; returns its lines."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_size", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", nargs="+", default=list(RUNS), choices=list(RUNS), help="default: all")
    parser.add_argument("--run", nargs="+", help="names of runs, as the table has them; default: all")
    parser.add_argument("--device", default="auto", help="where the runs compute")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where checkpoints are, or are made and stay")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further settings, values as JSON")
    parser.add_argument("--markdown", action="store_true", help="print the table as docs/memory.md has it")
    parser.add_argument(
        "--update", action="store_true", help=f"write {FILE.name} and docs/memory.md; other runs' lines stay"
    )
    options = parser.parse_args(arguments)
    further = {key: json.loads(value) for key, _, value in (item.partition("=") for item in options.set)}
    lines: list[Line] = []
    for model in options.model:
        names = [name for name in RUNS[model] if not options.run or name in options.run]
        with checkpoint(model, options.keep) as folder:
            for name in names if folder is not None else []:
                lines += measured(model, name, folder, options.device, further)
                if options.update:  # after each: the longest take an hour
                    write(merged(read(FILE), lines), FILE, DOCUMENT)
    print(text_of(lines, options.markdown))
    return lines


if __name__ == "__main__":
    main()
