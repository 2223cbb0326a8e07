"""The command: what it is given becomes a request, what cannot be used exits with 2, and parts are real processes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from blockskip.benchmark import processes
from blockskip.benchmark.parts import Part
from blockskip.benchmark.request import QUICK_STEPS, Request
from blockskip.benchmark.settings import QUICK
from blockskip.cli import main
from blockskip.errors import RunError


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the job is called with, instead of doing it."""
    from blockskip.benchmark import job

    calls: list[Any] = []

    def benchmark(*args: Any) -> job.Outcome:
        calls.append(args)
        return job.Outcome(True, "the table", args[0].folder / "results.jsonl")

    monkeypatch.setattr(job, "benchmark", benchmark)
    return calls


def test_everything_that_is_given_is_in_the_request(asked: list[Any], tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "more.toml").write_text("[lora]\nrank = 8\n")
    line = (
        "benchmark --model builtin-sana --output out --settings patches skip-50 --subjects owl --seeds 0 1 --steps 7 "
        f"--config {tmp_path / 'more.toml'} --encoders dino,clip --images 3 --points 2 --num-inference-steps 4 "
        "--guidance-scale 2 --height 64 --width 128 --batch-size 5 --jobs 1 --time-limit 2.5 --selection s.json"
    )
    assert main(line.split()) == 0
    assert asked == [(
        Request(
            model="builtin-sana", output="out", settings=("patches", "skip-50"), subjects=("owl",), count=None,
            seeds=(0, 1), training={"lora.rank": 8, "train.steps": 7}, encoders=("dino", "clip"), images=3, points=2,
            steps=4, guidance_scale=2.0, height=64, width=128, batch_size=5, selection="s.json",
        ), 1, 2.5,
    )]  # fmt: skip
    assert "the table" in capsys.readouterr().out


def test_before_the_first_row_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    from blockskip.benchmark import job

    nothing = job.Outcome(False, "", tmp_path / "results.jsonl")
    monkeypatch.setattr(job, "benchmark", lambda *args: nothing)
    assert main(["benchmark"]) == 0
    out = capsys.readouterr().out
    assert "No row is finished yet" in out and "table.md" not in out


def test_without_options_it_is_the_core_table_of_six_subjects(asked: list[Any]) -> None:
    main(["benchmark"])
    main(["benchmark", "--quick"])
    main(["benchmark", "--quick", "--steps", "5", "--images", "2", "--settings", "resize", "--count", "1"])
    core, quick, changed = (call[0] for call in asked)
    assert (core.settings, core.count, core.which) == (("core",), 6, "development") and asked[0][1:] == (None, None)
    assert (quick.settings, quick.count, quick.images) == (QUICK, 2, 1)
    assert quick.training == {"train.steps": QUICK_STEPS}
    assert (changed.settings, changed.count, changed.images) == (("resize",), 1, 2)
    assert changed.training == {"train.steps": 5}


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--jobs 0", "--jobs must be at least 1, not 0."),
        ("--time-limit 0", "--time-limit must be more than 0 minutes"),
        ("--settings foo", '--settings "foo" is not one of core, all, lora'),
        ("--subjects dragon", '--subjects "dragon" is not of the development set'),
        ("--set final", '--set "final" is not one of development, test'),
        ("--images none", "Argument --images"),
        ("--encoder dino", '"--encoder" is not an option of `blockskip benchmark`; did you mean "--encoders"'),
        ("--model owner/name", "--subjects-from is missing"),
        ("--config nowhere.toml", 'The config file "nowhere.toml" cannot be read'),
        ("--encoders nowhere", 'the image encoder "nowhere"'),
    ],
)
def test_what_cannot_be_used_exits_with_2(line: str, sentence: str, capsys: Any, tmp_path: Path) -> None:
    assert main(["benchmark", "--output", str(tmp_path / "out"), *line.split()]) == 2
    assert sentence in capsys.readouterr().err and not (tmp_path / "out" / "runs").exists()


def part(folder: Path, **task: Any) -> Part:
    return Part("run", "a part", "key", folder, {"key": "key", "folder": str(folder), **task})


def test_a_part_is_a_process_with_its_share_of_the_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A task that cannot be done: its process tells why in its log, and that is what the benchmark tells."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(processes, "cores", lambda: 4)
    started: list[dict[str, str]] = []
    original = processes.subprocess.Popen

    def popen(command: list[str], **more: Any) -> Any:
        started.append(more["env"])
        return original(command, **more)

    monkeypatch.setattr(processes.subprocess, "Popen", popen)
    request = Request(model=str(tmp_path / "nothing"), subjects_from="x").as_json()
    with pytest.raises(RunError, match=r"a part failed; the last line of .*log.txt: blockskip: model.path = .* is nei"):
        processes.do([part(tmp_path / "part", kind="others", request=request)], 2, None)
    assert started[0]["OMP_NUM_THREADS"] == "2" and json.loads((tmp_path / "part" / "task.json").read_text())
    assert "1 of 1 parts to do, 2 at a time with 2 threads each" in capsys.readouterr().out


def test_a_process_is_stopped_at_the_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    original = processes.subprocess.Popen

    def popen(command: list[str], **more: Any) -> Any:
        started.append(original([command[0], "-c", "import time; time.sleep(60)"], **more))
        return started[0]

    monkeypatch.setattr(processes.subprocess, "Popen", popen)
    assert processes.do([part(tmp_path / "part")], 1, 0.5) is False
    assert started[0].poll() is not None and not (os.name == "posix" and started[0].returncode == 0)


#: Starts a worker whose task is a pipe that nobody writes to, tells its process, and waits to be killed.
PARENT = """
import subprocess, sys
worker = subprocess.Popen([sys.executable, "-m", "blockskip.benchmark.worker", sys.argv[1]])
print(worker.pid, flush=True)
worker.wait()
"""


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="of systems with named pipes")
def test_a_part_ends_when_the_benchmark_was_killed(tmp_path: Path) -> None:
    import psutil

    task = tmp_path / "task.json"
    os.mkfifo(task)
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(task)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = psutil.Process(int(parent.stdout.readline()))
    try:
        with task.open("w", encoding="utf-8"):  # opens when the worker reads: it has begun, and now it hangs
            assert worker.is_running()
            parent.kill()
            parent.wait()
            worker.wait(30)
    finally:
        if worker.is_running():
            worker.kill()
    assert not worker.is_running()
