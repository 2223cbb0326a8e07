"""Invented reports. ``python -m tests.report.examples FOLDER`` writes them as pages, to look at."""

from __future__ import annotations

import dataclasses
import math
import random
import sys
from pathlib import Path

from PIL import Image

from blockskip.evaluation.fidelity import Fidelity
from blockskip.measure import Peaks, PhaseRecord
from blockskip.report.content import Column, Overrun, Report, RunFacts
from tests.evaluation.pictures import ball, grass, noise, stripes

MIB = 2**20
CONFIG = """output = "/home/somebody/out/dog"

[model]
path = "builtin"

[data]
images = "/home/somebody/photos/rex"
prompt = "a photo of sks dog"

[train]
steps = 500
"""
PROMPTS = ["a photo of sks dog", "a photo of sks dog on the beach, at sunset", "sks dog in a forest"]


def record(name: str, seconds: float, private: float, mapped: float, both: float, device: float = 0) -> PhaseRecord:
    """A phase; sizes in MiB."""
    return PhaseRecord(
        name,
        seconds,
        int(private * MIB),
        int(mapped * MIB),
        int(device * MIB),
        int(1.1 * device * MIB),
        int(both * MIB),
    )


def losses(seed: int, end: float, steps: int = 500) -> list[tuple[int, float]]:
    """A noisy falling curve."""
    rng = random.Random(seed)
    return [(step, end + 0.35 * math.exp(-step / 120) + rng.gauss(0, 0.12) ** 2 * 3) for step in range(1, steps + 1)]


def plain(device: float = 0) -> RunFacts:
    """Plain LoRA."""
    phases = [
        record("encode", 6.2, 148, 96, 201),
        record("train", 431, 402, 38, 433, device),
        record("preview", 44, 290, 41, 322, device / 2),
    ]
    return RunFacts(0, 18_240_000, 402_432, phases, 3 * MIB, 500, 486, None, 12, 128, 128, CONFIG, 312 * MIB)


def blockskip(device: float = 0) -> RunFacts:
    """DiT-BlockSkip."""
    phases = [
        record("encode", 6.1, 147, 96, 200),
        record("precompute", 38, 96, 62, 131, device / 3),
        record("train", 152, 168, 31, 190, device / 2),
        record("preview", 45, 291, 40, 321, device / 2),
    ]
    return RunFacts(9_120_000, 9_120_000, 201_216, phases, 212 * MIB, 500, 244, (3, 3), 12, 64, 128, CONFIG, 312 * MIB)


def full(device: float = 0, seeds: int = 2) -> Report:
    """Base, plain LoRA and DiT-BlockSkip."""

    def drawn(draw):
        return [[draw(10 * prompt + seed) for seed in range(seeds)] for prompt in range(len(PROMPTS))]

    return Report(
        "sks dog",
        "A subject that the built-in model had never seen, learned with half of its blocks out of memory.",
        [ball(seed) for seed in range(5)],
        PROMPTS,
        [
            Column("Base model", drawn(grass), fidelity=Fidelity(0.412, 0.412, 0.801)),
            Column("Plain LoRA", drawn(stripes), losses(1, 0.31), plain(device), Fidelity(0.721, 0.412, 0.801)),
            Column("DiT-BlockSkip", drawn(ball), losses(2, 0.33), blockskip(device), Fidelity(0.709, 0.412, 0.801)),
        ],
    )


def single() -> Report:
    """One run beside its base."""
    whole = full(seeds=1)
    return Report(
        "sks dog",
        "",
        whole.subject_pictures,
        whole.prompts[:2],
        [
            Column("Base model", whole.columns[0].images[:2]),
            Column("DiT-BlockSkip", whole.columns[2].images[:2], losses(2, 0.3, 60), blockskip()),
        ],
    )


def bare() -> Report:
    """One run without previews and without fidelity."""
    return Report("out", "", [], [], [Column("DiT-BlockSkip", [], [(1, 0.4)], blockskip())])


def hostile() -> Report:
    """Texts that try to break the page."""
    names = [
        "<script>alert(1)</script>",
        '"><img src=x onerror=alert(2)> $\\frac{1}{0}$ \N{DOG FACE}' + "y" * 200,
        "\u202e\x1b[31mred\x00 \N{FAMILY} \u72d7\u72d7 {{ 7*7 }} _x",
    ]
    picture = noise(0)
    return Report(
        "<b>&amp;</b> {% raw %} \ud800 \N{DOG FACE}",
        "</style><script>alert(3)</script>",
        [picture.convert("P"), picture.convert("LA"), Image.new("RGBA", (900, 300), (255, 0, 0, 40))],
        ["<script>alert(4)</script>", "very long " * 500, "x" * 3000],
        [
            Column(
                name,
                [[picture], [], [picture, picture, picture]],
                [(1, float("nan")), (2, 0.5), (3, float("inf")), (4, 0.4)],
                plain() if index else None,
                Fidelity(0.2, 0.4, 0.8),
            )
            for index, name in enumerate(names)
        ],
    )


def budget(device: float = 0) -> Report:
    """A run that was planned, and took more than it was given."""
    planned = {
        "encode": Peaks(190 * MIB), "precompute": Peaks(131 * MIB, int(device * MIB)),
        "train": Peaks(150 * MIB, int(device * MIB / 2)),
    }  # fmt: skip
    advice = "--train.gradient-checkpointing or --train.stream-middle"
    overruns = [
        Overrun("train", "memory", 190 * MIB, 160 * MIB, advice),
        Overrun("the run", "disk space", 3 * MIB, 2 * MIB, "<b>"),
    ]
    facts = dataclasses.replace(blockskip(device), planned=planned, overruns=overruns)
    return Report("out", "", [], [], [Column("DiT-BlockSkip", [], [(1, 0.4)], facts)])


EXAMPLES = {
    "full": full,
    "device": lambda: full(41_000),
    "single": single,
    "bare": bare,
    "hostile": hostile,
    "budget": budget,
}

if __name__ == "__main__":
    from blockskip.report.html import write_report
    from blockskip.report.text import render_text

    for key, make in EXAMPLES.items():
        write_report(make(), Path(sys.argv[1]) / f"{key}.html")
        (Path(sys.argv[1]) / f"{key}.txt").write_bytes(render_text(make()).encode("utf-8", "replace"))
