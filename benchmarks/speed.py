"""How long a run takes beside plain LoRA, and beside what its arithmetic alone would take.

    python -m benchmarks.speed                                  the built-in models and two random ones of real classes
    python -m benchmarks.speed --models builtin --repeats 30 --json speed.json --markdown

Four ways of training one model take turns in this process: plain LoRA at the full resolution, LoRA at the training
resolution, DiT-BlockSkip at 30% and at 50%. Every figure is a median over the turns; totals are of 500 optimiser steps
with accumulation 4. What is timed is the package's own code: ``Trainer.micro_step`` and ``Trainer.update``,
``precompute`` with its writing, and ``micro_batches``, which reads ahead from the disk. Latents and text are random.

    total     = precompute of every sample + 2000 micro-steps with what they wait for + 500 updates
    FLOP bound = FLOPs(one forward pass of the base a sample + micro-steps) / FLOPs(micro-steps of plain LoRA)
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

import diffusers
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.random_models import MODELS, random_text, write_model
from benchmarks.speed_table import markdown_tables, text_tables
from blockskip import builtin
from blockskip.adapters.lora import add_lora, target_names
from blockskip.config import LoraConfig, TrainConfig
from blockskip.data.noise import noise, sigmas
from blockskip.data.schedule import Group, Sample
from blockskip.families import stack_text
from blockskip.features.precompute import Input, precompute
from blockskip.loading.source import ModelSource, open_model
from blockskip.loading.transformer import empty_transformer, load_transformer
from blockskip.method.capture import capture
from blockskip.method.skipping import ConstantResidual, SkippedModel
from blockskip.method.split import split_for_ratio
from blockskip.precision import compute, denormals_flushed
from blockskip.progress import quiet
from blockskip.store.groups import GroupStore
from blockskip.training.batches import micro_batches
from blockskip.training.loop import Trainer
from blockskip.training.step import MicroBatch

CPU, DTYPE = torch.device("cpu"), torch.float32
RULE = ConstantResidual()
WINDOW_BYTES = 1 << 30
#: Of ``features.pool``: a quarter of the samples are stored and cycled.
POOL = 0.25


@dataclass(frozen=True)
class Way:
    """One way of training: the share of blocks that is skipped, and at which resolution."""

    name: str
    ratio: float
    full: bool = False


WAYS = (
    Way("plain LoRA", 0.0, full=True), Way("LoRA, training resolution", 0.0), Way("DiT-BlockSkip 30%", 0.3),
    Way("DiT-BlockSkip 50%", 0.5),
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Args:
        repeats: turns of every way.
        micro_steps: of a turn, one after the other.
        few, many: groups of two precomputations; their difference is what a sample takes, the rest is once a window.
        waiting: micro-steps in a row over which waiting for the store is measured, ``waits`` times.
    """

    repeats: int
    micro_steps: int
    few: int
    many: int
    waiting: int
    waits: int


@dataclass
class Figures:
    """Of one way of training one model; seconds are medians.

    Args:
        precompute: seconds a sample; ``window``: once a window of ``window_samples``.
        waiting: seconds that a micro-step waits for its batch; ``waiting_share``: of the time with its update.
        total, pool_total: seconds of 500 steps; the second with a pool of a quarter of the samples.
        bound, pool_bound: FLOPs of those over plain LoRA's.
    """

    way: str
    micro_step: float = 0.0
    update: float = 0.0
    waiting: float = 0.0
    waiting_share: float = 0.0
    precompute: float = 0.0
    window: float = 0.0
    window_samples: int = 0
    total: float = 0.0
    pool_total: float = 0.0
    micro_step_flops: int = 0
    precompute_flops: int = 0
    bound: float = 1.0
    pool_bound: float = 1.0


@dataclass
class Arm:
    """A way of training, ready to take turns."""

    way: Way
    source: ModelSource
    folder: Path
    groups: int
    times: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        source, family = self.source, self.source.family
        layout, shapes = family.layout, empty_transformer(self.source)
        self.split = split_for_ratio(self.way.ratio, layout.count(shapes))
        middle = self.split.middle(layout.count(shapes))
        side = (1 if self.way.full else 0.5) * source.full_resolution / family.vae_factor(source.config("vae"))
        self.shape = (1, family.latent_channels(source.config("vae")), int(side), int(side))
        self.text = {"": random_text(source, 0)}
        self.schedule = [
            Group(i, (Sample(0, (0, 0, 8, 8), False, (i + 0.5) / self.groups, i, "", 1.0),), (8, 8))
            for i in range(self.groups)
        ]
        self.keys = [f"{index:032x}" for index in range(self.groups)]
        self.pixels = GroupStore(self.folder / "pixels")
        for index, key in enumerate(self.keys):
            drawn = torch.randn(self.shape, generator=torch.Generator().manual_seed(1000 + index))
            self.pixels.write(key, {"latents": drawn})
        self.features = GroupStore(self.folder / "features")
        self.precompute(self.groups, self.features)
        model = load_transformer(source, self.split.skipped(layout.count(shapes)), DTYPE, CPU)
        lora, config = LoraConfig(), TrainConfig()
        targets = target_names(shapes, layout, middle, family.lora_targets, each=False)
        parameters = add_lora(model, targets, lora.rank, float(lora.rank), lora.dropout, seed=0)
        self.trainer = Trainer(
            SkippedModel(model, layout, self.split, RULE), parameters, family, source.config("transformer"), config,
            lora.dropout, family.defaults.guidance_scale, DTYPE, CPU, self.folder, {},
        )  # fmt: skip
        model.train()

    def input(self, index: int) -> Input:
        """A group as ``precompute`` takes it."""
        samples, latents = self.schedule[index].samples, self.pixels.read(self.keys[index])["latents"]
        text = stack_text([self.text[sample.caption] for sample in samples])
        return Input(self.keys[index], latents, noise(samples, latents.shape[1:]), sigmas(samples), text)

    def batches(self, count: int) -> Iterator[MicroBatch]:
        """Micro-batches as a run reads them."""
        order = list(islice(cycle(range(self.groups)), count))
        stored = (self.features, self.keys) if RULE.stores(self.split) else None
        return micro_batches(order, self.schedule, self.text, (self.pixels, self.keys), stored)

    def precompute(self, groups: int, store: GroupStore) -> float:
        """Seconds of precomputing the first groups into a store; nothing is done where nothing is skipped."""
        began = time.perf_counter()
        with quiet():
            precompute(
                self.source, self.split, RULE, self.keys[:groups], self.input, store, window_bytes=WINDOW_BYTES,
                dtype=DTYPE, device=CPU, guidance=self.source.family.defaults.guidance_scale,
            )  # fmt: skip
        return time.perf_counter() - began

    def turn(self, plan: Plan) -> None:
        """One turn: micro-steps and an update, then two precomputations."""
        total = 0.0
        for batch in self.batches(plan.micro_steps):
            began = time.perf_counter()
            total += self.trainer.micro_step(batch, 0)
            self.note("micro_step", time.perf_counter() - began)
        began = time.perf_counter()
        self.trainer.update(total)
        self.note("update", time.perf_counter() - began)
        if RULE.stores(self.split):
            seconds = []
            for count in (plan.few, plan.many):
                with tempfile.TemporaryDirectory(dir=self.folder) as folder:
                    seconds.append(self.precompute(count, GroupStore(Path(folder))))
            each = (seconds[1] - seconds[0]) / (plan.many - plan.few)
            self.note("precompute", each)
            self.note("window", seconds[0] - plan.few * each)

    def wait(self, plan: Plan) -> None:
        """What micro-steps in a row, with their updates, wait for batches whose files are not in memory."""
        for key in self.keys:
            _drop_from_memory(self.pixels.path(key))
            _drop_from_memory(self.features.path(key))
        waited, began, total = 0.0, time.perf_counter(), 0.0
        batches = self.batches(plan.waiting)
        for micro in range(plan.waiting):
            asked = time.perf_counter()
            batch = next(batches)
            waited += time.perf_counter() - asked
            total += self.trainer.micro_step(batch, 0)
            if (micro + 1) % self.trainer.config.gradient_accumulation_steps == 0:
                self.trainer.update(total)
                total = 0.0
        whole = time.perf_counter() - began
        batches.close()  # type: ignore[attr-defined]
        self.note("waiting", waited / plan.waiting)
        self.note("waiting_share", waited / whole)

    def note(self, name: str, seconds: float) -> None:
        """Keep one measurement."""
        self.times.setdefault(name, []).append(seconds)

    def flops(self) -> tuple[int, int]:
        """FLOPs of a micro-step, and of what a sample's features take: the base's forward pass as far as it is needed.

        Attention is written out as matrix products, since the counter knows no fused kernel of a CPU.
        """
        batch = next(iter(self.batches(1)))
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            self.trainer.micro_step(batch, 0)
        self.trainer.optimizer.zero_grad(set_to_none=True)
        if not RULE.stores(self.split):
            return counter.get_total_flops(), 0
        family, count = self.source.family, self.trainer.model.num_blocks
        unneeded = [] if self.split.tail else range(self.split.front, count)
        base = load_transformer(self.source, unneeded, DTYPE, CPU)
        drawn = (batch.latents, batch.noise, batch.sigma, self.text[""])
        guidance = family.defaults.guidance_scale
        counted, exact = FlopCounterMode(display=False), sdpa_kernel(SDPBackend.MATH)
        with counted, exact, torch.no_grad(), compute(CPU, DTYPE):
            inputs = family.noisy_inputs(self.source.config("transformer"), *drawn, guidance, DTYPE)
            capture(base, family.layout, self.split, RULE, inputs)
        return counter.get_total_flops(), counted.get_total_flops()

    def figures(self) -> Figures:
        """The medians so far, without totals."""
        found = Figures(self.way.name, **{name: median(values) for name, values in self.times.items()})
        found.micro_step_flops, found.precompute_flops = self.flops()
        if RULE.stores(self.split):
            stored = self.features.read(self.keys[0])
            largest = max(sum(value.nbytes for name, value in stored.items() if name.startswith(part))
                          for part in ("front.", "tail."))  # fmt: skip
            found.window_samples = max(1, WINDOW_BYTES // (3 * largest))
        return found


def complete(figures: Sequence[Figures], config: TrainConfig | None = None) -> None:
    """Fill in totals and bounds; the first of the figures is plain LoRA."""
    config = config or TrainConfig()
    samples = config.steps * config.gradient_accumulation_steps
    plain = figures[0]
    for one in figures:
        train = samples * (one.micro_step + one.waiting) + config.steps * one.update

        def before(share: float, one: Figures = one) -> float:
            windows = -(-samples * share // one.window_samples) if one.window_samples else 0
            return samples * share * one.precompute + windows * one.window

        one.total, one.pool_total = train + before(1), train + before(POOL)
        one.bound = (one.precompute_flops + one.micro_step_flops) / plain.micro_step_flops
        one.pool_bound = (POOL * one.precompute_flops + one.micro_step_flops) / plain.micro_step_flops


@denormals_flushed()
def measure(source: ModelSource, plan: Plan, folder: Path) -> list[Figures]:
    """Let the four ways take turns on a model."""
    arms = []
    for number, way in enumerate(WAYS):
        (folder / f"{number}").mkdir()
        arms.append(Arm(way, source, folder / f"{number}", plan.many))
    for arm in arms:
        arm.turn(plan)  # the first one warms up
        arm.times.clear()
    for _ in range(plan.repeats):
        for arm in arms:
            arm.turn(plan)
    for _ in range(plan.waits):
        for arm in arms:
            arm.wait(plan)
    figures = [arm.figures() for arm in arms]
    complete(figures)
    return figures


def plan_for(name: str, quick: bool, repeats: int | None) -> Plan:
    """Turns that fit the size of a model."""
    if quick:
        return Plan(repeats or 1, 2, 1, 3, 4, 1)
    return Plan(repeats or 4, 1, 1, 4, 4, 1) if name in MODELS else Plan(repeats or 12, 8, 8, 40, 40, 3)


def _drop_from_memory(path: Path) -> None:
    """Let the system forget a file's contents, where it can be told so."""
    if path.is_file() and hasattr(os, "posix_fadvise"):
        with path.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print the table, and return what ``--json`` writes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description=__doc__.splitlines()[0])
    names = [*builtin.MODELS, *MODELS]
    parser.add_argument("--models", nargs="+", default=names, help=f"of {', '.join(names)}, or pipeline folders")
    parser.add_argument("--repeats", type=int, help="turns of every way (12 for trained models, 4 for random ones)")
    parser.add_argument("--threads", type=int, default=1, help="of torch; with more, nothing else should be running")
    parser.add_argument("--quick", action="store_true", help="one short turn, to see that everything runs")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--markdown", action="store_true", help="print the table as docs/speed.md has it")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    diffusers.utils.logging.disable_progress_bar()
    began, models = time.monotonic(), {}
    for name in options.models:
        with tempfile.TemporaryDirectory(prefix="blockskip-speed-", ignore_cleanup_errors=True) as folder:
            root = Path(folder)
            source = write_model(name, root / "model") if name in MODELS else open_model(name)
            plan = plan_for(name, options.quick, options.repeats)
            models[name] = measure(source, plan, root)
            print(text_tables(name, models[name]), flush=True)
    if options.markdown:
        print(markdown_tables(models))
    document = {
        "torch": torch.__version__, "machine": platform.machine(), "threads": options.threads,
        "minutes": round((time.monotonic() - began) / 60, 1),
        "models": {name: [asdict(one) for one in figures] for name, figures in models.items()},
    }  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"{document['minutes']} minutes")
    return document


if __name__ == "__main__":
    main()
