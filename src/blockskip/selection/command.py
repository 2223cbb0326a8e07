"""The options of ``blockskip select``, and what it prints. Imports nothing heavy before it is called."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from blockskip.errors import UserError
from blockskip.settings import read_toml

DESCRIPTION = (
    "Find out which blocks of a model matter: hide the text from the image in the first n and the last m blocks, and "
    "choose for each skip ratio the split whose pictures change least (Eq. 2 of the paper). Uses adapters of the "
    "model, or trains some first. An interrupted selection goes on with the same command. Use the result with "
    "`blockskip train --skip.selection selection.json`."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Everything that can be asked for."""
    parser.add_argument("--model", default="builtin", help='as of train (default: "builtin")')
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    parser.add_argument("--model.transformer", dest="transformer", metavar="FILE", help="as of train")
    parser.add_argument(
        "--output", type=Path, default=Path("selection.json"), metavar="FILE",
        help="the result; its figures, and adapters that are trained, lie in the folder of the same name without .json "
        "(default: selection.json)",
    )  # fmt: skip
    parser.add_argument("--ratios", default="0.3,0.4,0.5", help="skip ratios, with commas (default: 0.3,0.4,0.5)")
    parser.add_argument(
        "--probe", choices=("both", "pictures", "velocity"), default="both",
        help="pictures: the paper's, chooses the split; velocity: without drawing, in a fraction of the time, chooses "
        "where it is alone (default: both)",
    )  # fmt: skip
    group = parser.add_argument_group("the tuned models")
    group.add_argument("--loras", nargs="+", default=(), metavar="PATH", help="adapters, or output folders of runs")
    group.add_argument(
        "--images", nargs="+", default=(), metavar="FOLDER",
        help="without --loras: a folder of pictures for each subject to train on; a built-in model brings its own",
    )  # fmt: skip
    group.add_argument(
        "--prompt", default="a photo of sks {}", metavar="TEXT",
        help='caption of the pictures; {} stands for the folder\'s name (default: "a photo of sks {}")',
    )  # fmt: skip
    group.add_argument("--count", type=int, default=4, metavar="N", help="subjects to train on, at most (default: 4)")
    group.add_argument("--config", type=Path, metavar="FILE", help="settings of these trainings, in TOML")
    group.add_argument("--steps", type=int, metavar="N", help="optimiser steps of these trainings")
    group = parser.add_argument_group("the pictures")
    group.add_argument(
        "--prompts", nargs="+", default=(), metavar="TEXT",
        help="drawn with every adapter; {} stands for its caption (default: a few scenes)",
    )  # fmt: skip
    group.add_argument("--images-per-prompt", type=int, default=2, metavar="N", help="noise seeds (default: 2)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="the first of them (default: 0)")
    group.add_argument(
        "--encoder", default="efficientnet", metavar="NAME",
        help="efficientnet (a package), dino, clip, a folder or a hub id (default: efficientnet)",
    )  # fmt: skip
    group.add_argument(
        "--window", type=int, metavar="N", help="blocks in the sliding window (default: a quarter; 0: none)"
    )
    group.add_argument("--num-inference-steps", type=int, metavar="N", help="sampler steps; default: the model's")
    group.add_argument("--guidance-scale", type=float, metavar="X", help="default: the model's")
    group.add_argument("--height", type=int, metavar="N", help="pixels; default: the model's")
    group.add_argument("--width", type=int, metavar="N", help="pixels; default: the model's")
    group = parser.add_argument_group("the proof")
    group.add_argument(
        "--validate", type=float, metavar="RATIO",
        help="also train two subjects with the split chosen for this ratio and with its neighbours, and compare them",
    )  # fmt: skip
    group = parser.add_argument_group("how it is computed")
    group.add_argument(
        "--batch-size",
        type=int,
        default=16,
        metavar="N",
        help="pictures that go through the model together (default: 16)",
    )
    group.add_argument("--stream", action="store_true", help="hold one block, and one text encoder layer, at a time")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda, mps")
    group.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, float16")


def call(given: argparse.Namespace) -> int:
    """Do what was asked for and print the splits."""
    request = _request(given)
    problems = request.check()
    if given.validate is not None and given.validate not in request.ratios:
        problems.append(f"--validate {given.validate} is not one of --ratios {given.ratios}.")
    if problems:
        raise UserError(problems)
    from blockskip.selection.job import select, table_text, validation_text

    found = select(request, given.validate)
    print(table_text(found))
    if "validation" in found:
        print("\n" + validation_text(found["validation"]))
    print(f"\n{given.output}  (blockskip train --skip.selection {given.output})")
    return 0


def _request(given: argparse.Namespace) -> Any:
    from blockskip.selection.request import Request

    try:
        ratios = tuple(dict.fromkeys(float(part) for part in given.ratios.split(",") if part.strip()))
    except ValueError:
        raise UserError(
            f'--ratios "{given.ratios}" must be numbers with commas between, 0.3,0.4,0.5 for example.'
        ) from None
    training = read_toml(given.config) if given.config else {}
    if given.steps is not None:
        training["train.steps"] = given.steps
    probes = ("pictures", "velocity") if given.probe == "both" else (given.probe,)
    return Request(
        given.model, given.revision, tuple(given.loras), tuple(given.images), given.prompt, given.count,
        tuple(given.prompts), ratios, probes, given.encoder, given.images_per_prompt, given.seed,
        given.num_inference_steps, given.guidance_scale, given.height, given.width, given.window, training,
        given.output.expanduser(), given.batch_size, given.stream, given.device, given.dtype, given.transformer,
    )  # fmt: skip
