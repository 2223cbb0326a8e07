"""The options of ``blockskip demo`` and what it prints."""

from __future__ import annotations

import argparse
from pathlib import Path

DESCRIPTION = "Train plain LoRA and DiT-BlockSkip on 5 pictures of a built-in subject, and compare them."


def add_options(parser: argparse.ArgumentParser) -> None:
    """Every option of the verb."""
    parser.add_argument("--output", type=Path, default=Path("demo"), help="folder to write (default: demo)")
    parser.add_argument("--subject", help="one of the built-in subjects")
    parser.add_argument("--steps", type=int, help="optimiser steps of both runs")


def call(given: argparse.Namespace) -> int:
    """Run the demo and print its comparison."""
    from blockskip.benchmark.demo import demo

    print(demo(given.output, given.subject, given.steps))
    return 0
