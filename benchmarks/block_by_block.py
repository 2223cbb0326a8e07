"""Precompute block by block at full size: what reading ahead saves, and what a window on disk costs and spares.

    python -m benchmarks.block_by_block                        SANA-0.6B, random weights; a few minutes of two cores
    python -m benchmarks.block_by_block --keep build --rounds 9

A group is one sample of 512 x 512 with 300 text tokens, in bfloat16. Before every pass the system is asked to forget
the transformer's files, so that each block really comes from the disk; what is compared alternates, medians are told.
Memory is what torch's tensors of waiting groups take. Needs a system that takes advice about files (Linux).
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from unittest import mock

import torch

from benchmarks.paper_memory import table
from benchmarks.random_models import random_text
from benchmarks.real_size import checkpoint
from blockskip.features.precompute import Input, precompute
from blockskip.loading.source import ModelSource, open_model
from blockskip.loading.weights import Weights
from blockskip.method.skipping import ConstantResidual
from blockskip.method.split import Split
from blockskip.store.groups import GroupStore

MODEL, SIDE, SPLIT, CPU = "sana-0.6b", 512, Split(7, 7), torch.device("cpu")
HEADINGS = ("groups", "window", "next block is fetched", "seconds", "of that without", "files of the window, MiB")


def forget(source: ModelSource) -> None:
    """Let the system forget what it holds of the transformer's files."""
    for file in sorted(set(Weights(source.part_folder("transformer")).files.values())):
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def nothing_is_fetched() -> Iterator[None]:
    """Inside, blocks come from the disk when they are asked for."""
    with mock.patch("blockskip.loading.ahead.expect"):
        yield


def seconds(source: ModelSource, groups: int, fetched: bool, on_disk: bool, folder: Path) -> tuple[float, int]:
    """One window of groups through all blocks, with loading: seconds, and bytes of the window's files."""
    side = SIDE // source.pixel_stride
    shape = (1, source.family.latent_channels(source.config("vae")), side, side)
    text = random_text(source, 0)

    def read(index: int) -> Input:
        generator = torch.Generator().manual_seed(index)
        latents, noise = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
        return Input(f"{index:04x}", latents, noise, torch.tensor([0.5]), text)

    forget(source)
    with tempfile.TemporaryDirectory(dir=folder) as own, _either(fetched):
        keys, store = [f"{index:04x}" for index in range(groups)], GroupStore(Path(own) / "features")
        begun = time.perf_counter()
        files = precompute(
            source, SPLIT, ConstantResidual(), keys, read, store, window_bytes=2**40, dtype=torch.bfloat16, device=CPU,
            guidance=1.0, waiting_folder=Path(own) / "waiting" if on_disk else None,
        )  # fmt: skip
        return time.perf_counter() - begun, files


@contextmanager
def _either(fetched: bool) -> Iterator[None]:
    if fetched:
        yield
    else:
        with nothing_is_fetched():
            yield


def measured(source: ModelSource, groups: Sequence[int], rounds: int, folder: Path) -> list[tuple[str, ...]]:
    """Rows of the table."""
    rows = []
    ways = [(fetched, on_disk) for on_disk in (False, True) for fetched in (False, True)]
    for count in groups:
        found: dict[tuple[bool, bool], list[tuple[float, int]]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way in ways:
                found[way].append(seconds(source, count, *way, folder))
        for fetched, on_disk in ways:
            took = median(one for one, _ in found[fetched, on_disk])
            without = median(one for one, _ in found[False, on_disk])
            files = max(size for _, size in found[fetched, on_disk])
            rows.append((
                str(count), "disk" if on_disk else "memory", "yes" if fetched else "no", f"{took:.2f}",
                f"{took / without:.0%}", f"{files / 2**20:.1f}" if on_disk else "",
            ))  # fmt: skip
    return rows


def main(arguments: Sequence[str] | None = None) -> list[tuple[str, ...]]:
    """Measure and print the table; returns its rows."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.block_by_block", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 4, 16], help="in the window (default: 1 4 16)")
    parser.add_argument("--rounds", type=int, default=5, help="of each way (default: 5)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where the checkpoint is, or is made and stays")
    parser.add_argument("--markdown", action="store_true", help="print the table as docs/memory.md has it")
    options = parser.parse_args(arguments)
    if not hasattr(os, "posix_fadvise"):
        parser.error("this system takes no advice about files")
    rows: list[tuple[str, ...]] = []
    with checkpoint(MODEL, options.keep) as folder:
        if folder is not None:
            rows = measured(open_model(str(folder)), options.groups, options.rounds, folder.parent)
    print(table(HEADINGS, rows, options.markdown))
    return rows


if __name__ == "__main__":
    main()
