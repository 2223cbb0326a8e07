"""The options of ``blockskip benchmark``, and what it prints. Imports nothing heavy before it is called."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from blockskip.errors import UserError
from blockskip.settings import read_toml

DESCRIPTION = (
    "Compare DiT-BlockSkip with plain LoRA and with its own parts: the same subjects, samples, seeds and steps for "
    "every setting, measured by held-out loss, subject and prompt fidelity, backgrounds, drift, memory and time. An "
    "interrupted benchmark goes on with the same command; settings and subjects can be added later. docs/benchmark.md "
    "has the protocol."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Everything that can be asked for."""
    parser.add_argument("--output", default="benchmark", metavar="FOLDER", help="folder to write (default: benchmark)")
    parser.add_argument("--model", default="builtin", help='as of train (default: "builtin")')
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    parser.add_argument("--model.transformer", dest="transformer", metavar="FILE", help="as of train")
    parser.add_argument(
        "--settings", nargs="+", default=None, metavar="NAME",
        help="rows of the table; plain LoRA is always among them; core: eight of them, all: every one (default: core)",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="2 subjects, 3 settings, few steps: ten minutes")
    parser.add_argument(
        "--time-limit", type=float, metavar="MINUTES", help="stop then; the same command goes on with what is left"
    )
    parser.add_argument(
        "--jobs", type=int, metavar="N",
        help="trainings side by side, each with its share of the processors (default: 2 on a CPU, 1 on a GPU)",
    )  # fmt: skip
    group = parser.add_argument_group("the subjects")
    group.add_argument(
        "--subjects", nargs="+", default=(), metavar="NAME", help="some of those that there are, by name"
    )
    group.add_argument("--count", type=int, metavar="N", help="the first N of them (default: 6, of your own all)")
    group.add_argument(
        "--set", dest="which", default="development", help="of the built-in subjects: development (default) or test"
    )
    group.add_argument(
        "--subjects-from", metavar="FOLDER",
        help="your own, as in DreamBooth's data set: a folder of pictures each, and a prompts.txt if you like",
    )  # fmt: skip
    group.add_argument(
        "--prompt", default="a photo of sks {}", metavar="TEXT",
        help='caption of the training pictures of your own; {} is the folder\'s name (default: "a photo of sks {}")',
    )  # fmt: skip
    group = parser.add_argument_group("the trainings")
    group.add_argument("--steps", type=int, metavar="N", help="optimiser steps of every setting")
    group.add_argument("--config", type=Path, metavar="FILE", help="further settings of all trainings, in TOML")
    group.add_argument(
        "--seeds", type=int, nargs="+", default=(0,), metavar="N", help="one training for each (default: 0)"
    )
    group.add_argument("--selection", metavar="FILE", help="split by a result of `blockskip select`")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda, mps")
    group.add_argument("--dtype", default="auto", help="auto, float32, bfloat16")
    group = parser.add_argument_group("the measuring")
    group.add_argument(
        "--encoders", metavar="NAMES",
        help="of subject fidelity, with commas: efficientnet, mobilenet (packages), dino, clip, folders or hub ids; "
        "with clip, prompts are scored by it too (default: efficientnet,mobilenet)",
    )  # fmt: skip
    group.add_argument("--images", type=int, metavar="N", help="pictures of each prompt (default: 2)")
    group.add_argument(
        "--points", type=int, metavar="N", help="how often a run is looked at before its end (default: 3)"
    )
    group.add_argument("--num-inference-steps", type=int, metavar="N", help="sampler steps; default: the model's")
    group.add_argument("--guidance-scale", type=float, metavar="X", help="default: the model's")
    group.add_argument("--height", type=int, metavar="N", help="pixels; default: the model's")
    group.add_argument("--width", type=int, metavar="N", help="pixels; default: the model's")
    group.add_argument("--batch-size", type=int, default=16, metavar="N", help="pictures drawn together (default: 16)")


def call(given: argparse.Namespace) -> int:
    """Do what was asked for and print the table."""
    request = _request(given)
    problems = request.check()
    if given.jobs is not None and given.jobs < 1:
        problems.append(f"--jobs must be at least 1, not {given.jobs}.")
    if given.time_limit is not None and not given.time_limit > 0:
        problems.append(f"--time-limit must be more than 0 minutes, not {given.time_limit}.")
    if problems:
        raise UserError(problems)
    from blockskip.benchmark.job import benchmark

    outcome = benchmark(request, given.jobs, given.time_limit)
    if not outcome.text:
        print(f"No row is finished yet; {outcome.results.parent} holds what is done of them.")
        return 0
    print(f"\n{outcome.text}\n\n{outcome.results}, beside it table.md, memory.png, steps.png and sheets/")
    return 0


def _request(given: argparse.Namespace) -> Any:
    from blockskip.benchmark.request import Request, quick

    training = read_toml(given.config) if given.config else {}
    if given.steps is not None:
        training["train.steps"] = given.steps
    encoders = tuple(part.strip() for part in (given.encoders or "").split(",") if part.strip())
    own = given.subjects_from is not None or given.subjects
    count = given.count if given.count is not None or own else 6
    request = Request(
        model=given.model, revision=given.revision, device=given.device, dtype=given.dtype, output=given.output,
        settings=tuple(given.settings or ("core",)), subjects=tuple(given.subjects), count=count, which=given.which,
        subjects_from=given.subjects_from, caption=given.prompt, seeds=tuple(given.seeds), training=training,
        selection=given.selection, encoders=encoders, batch_size=given.batch_size, height=given.height,
        width=given.width, steps=given.num_inference_steps, guidance_scale=given.guidance_scale,
        transformer=given.transformer,
    )  # fmt: skip
    if given.quick:
        request = quick(request)
    chosen = {"settings": given.settings, "count": given.count, "images": given.images, "points": given.points}
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in chosen.items() if v is not None}
    return Request(**{**request.__dict__, **values})
