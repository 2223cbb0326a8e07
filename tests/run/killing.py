"""A process that does runs in forks of itself, without a network, and kills them at events of the test's choice.

    python -m tests.run.killing plan.json report.json

The plan is a list of jobs, done one after the other: ``{"arguments": [...], "kill": "train: replace step-000002",
"nth": 1}``. Without ``kill`` the command runs to its end; "any" stands for every event. The report gives of each job
its exit status (-9: it was killed), its events, what it printed, and the network addresses that it asked for.

Events are called ``<phase>: <what> <file>``. A file's name is that of the finished file; ``group`` is a file of a
store.

    fsync     a temporary file is whole, and about to be flushed
    half      the same moment, but half of the file is lost
    replace   a file or folder is about to get its name
    replaced  it has its name
    remove    an old checkpoint is about to be removed, and half of it is
    flush     lines are about to be appended to the metrics
    torn      half a line was appended
    text, pixels, block, step    a kernel is about to run
"""

import contextlib
import functools
import gc
import json
import os
import re
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first step of an optimiser imports it; imported before the fork, like all that takes long

from blockskip import cli
from blockskip.families import FAMILIES
from blockskip.loading import transformer
from blockskip.measure import Meter
from blockskip.run import api, job
from blockskip.training import loop
from tests import tiny

TEMPORARY = re.compile(r"\.(.+)\.\d+(-[0-9a-f]{32})?\.tmp")


class Watch:
    """Counts events, and ends the process at the chosen one."""

    def __init__(self, kill: str | None, nth: int, events: Path) -> None:
        self.kill, self.left, self.events, self.phase = kill, nth, events, "start"

    def event(self, what: str, path: Path | None = None, damage: Callable[[], object] | None = None) -> None:
        """Note an event; ``damage`` is done just before the end."""
        name = f"{self.phase}: {what}"
        if path is not None:
            parts = [match[1] if (match := TEMPORARY.fullmatch(part)) else part for part in path.parts[-2:]]
            name += " group" if re.fullmatch(r"[0-9a-f]{32}\.safetensors", parts[-1]) else f" {parts[-1]}"
        with self.events.open("a", encoding="utf-8") as stream:
            stream.write(name + "\n")
        if self.kill not in (name, "any"):
            return
        self.left -= 1
        if not self.left:
            if damage is not None:
                damage()
            os.kill(os.getpid(), signal.SIGKILL)

    def install(self) -> None:
        """Put the events into the code."""
        fsync, replace, rmtree, flush, phase = os.fsync, Path.replace, shutil.rmtree, loop.Metrics.flush, Meter.phase

        def watched_fsync(descriptor: int) -> None:
            path = Path(f"/proc/self/fd/{descriptor}").readlink()
            if path.is_file():
                self.event("fsync", path)
                self.event("half", path, lambda: os.ftruncate(descriptor, path.stat().st_size // 2))
            fsync(descriptor)

        def watched_replace(path: Path, target: Path) -> Path:
            self.event("replace", Path(target))
            made = replace(path, target)
            self.event("replaced", Path(target))
            return made

        def watched_rmtree(path: Any, *args: Any, **kwargs: Any) -> None:
            if Path(path).name.startswith("step-"):
                self.event("remove", Path(path), (Path(path) / "state.safetensors").unlink)
            rmtree(path, *args, **kwargs)

        def watched_flush(metrics: loop.Metrics) -> None:
            self.event("flush")

            def tear() -> None:
                with metrics.path.open("a", encoding="utf-8") as stream:
                    stream.write(metrics._lines[0][:20])

            self.event("torn", damage=tear)
            flush(metrics)

        @contextlib.contextmanager
        def watched_phase(meter: Meter, name: str) -> Iterator[None]:
            before, self.phase = self.phase, name
            try:
                with phase(meter, name):
                    yield
            finally:
                self.phase = before

        def before(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def watched(*args: Any, **kwargs: Any) -> Any:
                self.event(what)
                return function(*args, **kwargs)

            return watched

        os.fsync, Path.replace = watched_fsync, watched_replace  # type: ignore[method-assign, assignment]
        shutil.rmtree, loop.Metrics.flush = watched_rmtree, watched_flush  # type: ignore[method-assign, assignment]
        Meter.phase = watched_phase  # type: ignore[method-assign, assignment]
        loop.training_loss = before("step", loop.training_loss)
        transformer.run_block = before("block", transformer.run_block)
        for family in {type(family) for family in FAMILIES}:
            family.encode_text = before("text", family.encode_text)  # type: ignore[method-assign]
            family.encode_pixels = before("pixels", family.encode_pixels)  # type: ignore[method-assign]


def forbid_network(asked: Path) -> None:
    """Let every use of a network fail, and note it."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        with asked.open("a", encoding="utf-8") as stream:
            stream.write(f"{args!r}\n")
        raise OSError("there is no network")

    socket.getaddrinfo = socket.create_connection = refuse
    socket.socket.connect = socket.socket.connect_ex = refuse  # type: ignore[method-assign]


def do(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One job in a fork."""
    files = {name: folder / name for name in ("events", "asked", "printed")}
    for path in files.values():
        path.write_bytes(b"")
    child = os.fork()
    if not child:
        code = 70
        try:
            forbid_network(files["asked"])
            descriptor = os.open(files["printed"], os.O_WRONLY)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            Watch(job.get("kill"), job.get("nth", 1), files["events"]).install()
            code = cli.main(job["arguments"])
        finally:
            sys.stdout.flush()
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    texts = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    return {
        "status": status, "events": texts["events"].splitlines(), "printed": texts["printed"],
        "asked": texts["asked"].splitlines(),
    }  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    assert tiny.CLIPTextModel and tiny.AutoencoderKL  # whose modules are imported by that
    api.write_run_report = lambda result: result.output  # it takes as long as a run
    job.plan_run = lambda prepared: None  # and so does this
    gc.collect()
    gc.freeze()
    plan, report = map(Path, sys.argv[1:])
    found = [do(job, report.parent) for job in json.loads(plan.read_text(encoding="utf-8"))]
    report.write_text(json.dumps(found), encoding="utf-8")
