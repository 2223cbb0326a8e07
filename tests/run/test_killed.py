"""A run that is killed at any moment is finished by the same command with the same bytes; no network is needed."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.run.runs import PROMPT, Run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and reads the names of open files from /proc")
ROOT = Path(__file__).resolve().parent.parent.parent
STEPS = 4

#: One after the other in the same output folder; each must happen.
KILLS = [
    ("encode text: text", 2), ("encode text: half group", 1), ("encode text: replaced group", 1),
    ("encode pictures: pixels", 3), ("encode pictures: fsync group", 2), ("encode pictures: half group", 1),
    ("precompute: block", 10), ("precompute: half group", 2), ("precompute: replace group", 2),
    ("train: step", 2), ("train: torn", 1), ("train: half state.safetensors", 1), ("train: replace checkpoint.json", 1),
    ("train: replace step-000001", 1), ("train: step", 4), ("train: replaced step-000002", 1),
    ("train: remove step-000001", 1), ("train: fsync state.safetensors", 1),
    ("train: half pytorch_lora_weights.safetensors", 1), ("train: replace pytorch_lora_weights.safetensors", 1),
    ("train: replaced pytorch_lora_weights.safetensors", 1), ("preview: block", 3),
    ("start: half step-000004-00-0.png", 1), ("start: replaced step-000004-00-0.png", 1),
]  # fmt: skip


@pytest.fixture(scope="module")
def killed(
    small_flux: Path, small_sana: Path, photos: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The reports of undisturbed runs, of one that is killed all the time, and of some that are killed at random."""
    folder = tmp_path_factory.mktemp("killed")

    def arguments(output: str, model: object = small_flux) -> list[str]:
        settings: dict[str, Any] = {
            "model": model, "images": photos, "prompt": PROMPT, "output": folder / output, "steps": STEPS,
            "data.full-resolution": 64, "resolution": 32, "data.text-length": 12, "rank": 4, "lora.dropout": 0.1,
            "train.gradient-accumulation-steps": 2, "train.lr-scheduler": "cosine", "train.lr-warmup-steps": 2,
            "train.checkpoint-every": 1, "train.checkpoints-total-limit": 2, "preview.prompts": "a dog",
            "preview.num-inference-steps": 2, "preview.height": 32, "preview.width": 32, "features.window": "30kB",
        }  # fmt: skip
        stream = ["--preview.stream"]
        return ["train", *stream, *(str(part) for name, value in settings.items() for part in (f"--{name}", value))]

    jobs: list[dict[str, Any]] = [{"arguments": arguments("plain"), "of": "plain"}]
    jobs += [{"arguments": arguments("killed"), "of": "killed", "kill": kill, "nth": nth} for kill, nth in KILLS]
    jobs += [{"arguments": arguments("killed"), "of": "killed"}]
    draw = random.Random(0)
    for family, model in (("flux", small_flux), ("sana", small_sana)):
        command = arguments(f"random {family}", model)
        jobs += [
            {"arguments": command, "of": f"random {family}", "kill": "any", "nth": draw.randint(1, 60)}
            for _ in range(5)
        ]
        jobs += [{"arguments": command, "of": f"random {family}"}]
    jobs += [{"arguments": arguments("plain sana", small_sana), "of": "plain sana"}]
    jobs += [{"arguments": arguments("hub", "owner/name"), "of": "hub"}]
    (folder / "plan.json").write_text(json.dumps(jobs), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    environment |= {"BLOCKSKIP_CACHE": str(folder / "hashes"), "HF_HOME": str(folder / "hub")}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    command = [sys.executable, "-m", "tests.run.killing", str(folder / "plan.json"), str(folder / "report.json")]
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=600)
    reports = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    found: dict[str, Any] = {"folder": folder}
    for job, report in zip(jobs, reports, strict=True):
        found.setdefault(job["of"], []).append(job | report)
    return found


def test_the_events_cover_every_phase(killed: dict[str, Any]) -> None:
    (plain,) = killed["plain"]
    assert plain["status"] == 0, plain["printed"]
    phases = {event.partition(":")[0] for event in plain["events"]}
    assert phases == {"start", "encode text", "encode pictures", "precompute", "train", "preview"}


def test_it_was_killed_where_it_should_be(killed: dict[str, Any]) -> None:
    *jobs, last = killed["killed"]
    for job in jobs:
        assert job["status"] == -9, (job["kill"], job["status"], job["printed"])
        assert (
            job["kill"] in job["events"][-8:]
        )  # groups are written by threads: others go on until the process is gone
        assert job["events"].count(job["kill"]) == job["nth"]
    assert last["status"] == 0, last["printed"]


@pytest.mark.parametrize("family", ["flux", "sana"])
def test_killed_at_random(killed: dict[str, Any], family: str) -> None:
    *jobs, last = killed[f"random {family}"]
    assert sum(job["status"] == -9 for job in jobs) >= 3
    assert {job["status"] for job in jobs} <= {-9, 0}
    assert last["status"] == 0, last["printed"]


@pytest.mark.parametrize(
    ("name", "plain_name"), [("killed", "plain"), ("random flux", "plain"), ("random sana", "plain sana")]
)
def test_a_killed_run_ends_with_the_same_bytes(killed: dict[str, Any], name: str, plain_name: str) -> None:
    plain, again = Run(killed["folder"] / plain_name), Run(killed["folder"] / name)
    assert again.adapter == plain.adapter
    assert again.metrics == plain.metrics
    assert again.state(STEPS) == plain.state(STEPS)
    assert again.state(STEPS - 1) == plain.state(STEPS - 1)
    assert again.files["samples/step-000004-00-0.png"] == plain.files["samples/step-000004-00-0.png"]
    assert again.files.keys() == plain.files.keys()  # no half file, no cache, no third checkpoint is left


def test_work_that_was_done_is_not_done_again(killed: dict[str, Any]) -> None:
    (plain,) = killed["plain"]

    def count(jobs: list[dict[str, Any]], event: str) -> int:
        return sum(job["events"].count(event) for job in jobs)

    for event, lost in (("encode pictures: pixels", 3), ("precompute: block", 40), ("train: step", 15)):
        once = count([plain], event)
        assert once < count(killed["killed"], event) <= once + lost, event
    # Nothing but what is left: the run that came after the adapter's file had its name trained no step.
    after = [job["kill"] for job in killed["killed"][:-1]].index("train: replaced pytorch_lora_weights.safetensors") + 1
    assert not count(killed["killed"][after:], "train: step")


def test_a_local_folder_needs_no_network(killed: dict[str, Any]) -> None:
    jobs = [job for name, jobs in killed.items() if name not in ("folder", "hub") for job in jobs]
    assert [job["asked"] for job in jobs] == [[]] * len(jobs)
    (hub,) = killed["hub"]  # a model that is no folder is asked for, which would have been seen
    assert hub["asked"]
    assert hub["status"] == 2
    assert "cannot be fetched from the hub" in hub["printed"]
