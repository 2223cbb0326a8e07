"""What is advised for a phase: first what the same run goes on with, and nothing that is set already."""

from pathlib import Path
from typing import Any

import pytest

from blockskip.planner.make import make_plan
from blockskip.run.advice import DISK, LAST, Try, advice, as_option, tries
from blockskip.run.planned import setting_of
from blockskip.run.prepare import Prepared
from tests.run.runs import Runs

PHASES = ["encode text", "encode pictures", "precompute", "train", "preview"]


def options(run: Prepared, phase: str, **kwargs: Any) -> list[str]:
    return list(map(str, tries(run, phase, **kwargs)))


def test_each_phase_has_its_own(flux_runs: Runs, tmp_path: Path) -> None:
    run = flux_runs.prepared(tmp_path, train__batch_size=4, data__full_resolution=1024, data__resolution=512)
    other, bf16 = " (in another output folder)", "--model.dtype bfloat16 (in another output folder)"
    half = [f"--train.batch-size 2 --train.gradient-accumulation-steps 4{other}", f"--resolution 256{other}"]
    assert options(run, "encode text") == ["--model.stream-text-encoders", bf16]
    assert options(run, "encode pictures") == [*half, bf16]
    assert options(run, "precompute") == ["--features.window 512MiB", "--features.window-on disk", *half, bf16]
    assert options(run, "precompute", on_device=True) == [*half, bf16]
    assert options(run, "train") == [
        "--train.gradient-checkpointing", "--train.stream-middle", f"--model.quantization int8{other}", *half, bf16
    ]  # fmt: skip
    assert options(run, "preview") == [
        "--preview.stream", "--preview.height 256 --preview.width 256", "--model.stream-text-encoders"
    ]  # fmt: skip


def test_a_window_larger_than_the_run_is_no_advice(flux_runs: Runs, tmp_path: Path) -> None:
    run = flux_runs.prepared(tmp_path)
    plan = make_plan(setting_of(run))
    assert plan.phases["precompute"].host["window of states"] < 64 * 2**20
    assert "--features.window 512MiB" in options(run, "precompute")
    assert not [text for text in options(run, "precompute", plan=plan) if "window" in text]


def test_nothing_that_is_set_is_advised(flux_runs: Runs, tmp_path: Path) -> None:
    run = flux_runs.prepared(
        tmp_path, train__gradient_checkpointing=True, train__stream_middle=True, skip__ratio=0.4,
        model__stream_text_encoders=True, preview__stream=True, features__window="4MiB", model__dtype="bfloat16",
    )  # fmt: skip
    assert options(run, "train") == ["--skip 0.5 (in another output folder)"]
    assert options(run, "encode text") == options(run, "precompute") == []
    assert options(run, "preview") == ["--preview.height 256 --preview.width 256"]
    assert advice(run, None, "encode text") == " or ".join(LAST[:2])
    assert advice(run, None, "train") == f"--skip 0.5 (in another output folder) or {LAST[0]}"


def test_a_second_block_on_a_device_of_its_own_is_given_up(
    flux_runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = flux_runs.prepared(tmp_path, train__stream_middle=True, preview__stream=True)
    alone = "--no-model.read-ahead"
    assert not any(alone in options(run, phase, on_device=True) for phase in ("precompute", "train", "preview"))
    monkeypatch.setattr("blockskip.run.advice.reads_ahead", lambda device: True)
    for phase in ("precompute", "train", "preview"):
        assert alone in options(run, phase, on_device=True)
        assert alone not in options(run, phase)
    resident = flux_runs.prepared(tmp_path / "resident", train__stream_middle=False, preview__stream=False)
    assert not any(alone in options(resident, phase, on_device=True) for phase in ("train", "preview"))
    off = flux_runs.prepared(tmp_path / "off", model__read_ahead=False)
    assert alone not in options(off, "precompute", on_device=True)


def test_quantised_blocks_may_be_streamed_elsewhere(flux_runs: Runs, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    run = flux_runs.prepared(tmp_path, model__quantization="int8", skip__front=1, skip__tail=1)
    assert options(run, "train")[:3] == [
        "--train.gradient-checkpointing",
        "--train.stream-middle --model.quantization none (in another output folder)",
        "--model.quantization nf4 (in another output folder)",
    ]


def test_the_same_run_goes_on_with_what_comes_first(flux_runs: Runs, tmp_path: Path) -> None:
    """Whatever continues has the fingerprint of the run, and nothing else has."""
    run = flux_runs.prepared(tmp_path)
    for phase in PHASES:
        found = tries(run, phase)
        assert [item.continues for item in found] == sorted((item.continues for item in found), reverse=True)
        for item in found:
            changed = {name.replace(".", "__"): value for name, value in item.values.items()}
            assert (flux_runs.prepared(tmp_path, **changed).fingerprint() == run.fingerprint()) == item.continues


def test_the_disk(flux_runs: Runs, tmp_path: Path) -> None:
    assert advice(flux_runs.prepared(tmp_path), None, DISK) == "a --features.disk, or fewer checkpoints"
    limited = flux_runs.prepared(tmp_path, features__disk="1GiB")
    assert advice(limited, None, DISK) == "a smaller --features.disk, or fewer checkpoints"


def test_options_are_those_of_the_command_line() -> None:
    assert as_option("skip.ratio", 0.5) == "--skip 0.5"
    assert as_option("train.gradient_checkpointing", True) == "--train.gradient-checkpointing"
    assert as_option("preview.num_inference_steps", 4) == "--preview.num-inference-steps 4"
    assert as_option("model.read_ahead", False) == "--no-model.read-ahead"
    assert str(Try({"features.window": "64MiB"})) == "--features.window 64MiB"
