"""Runs whose tail, or whose whole middle, is read block by block while training."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from blockskip.errors import UserError
from blockskip.loading.transformer import StreamedTransformer
from blockskip.method.streaming import StreamedBlock
from blockskip.run import job, prepare
from blockskip.run.prepare import may_change
from blockskip.settings import SHORT, from_flat
from blockskip.store.waiting import OnDisk
from tests.run.runs import Run, Runs, Written
from tests.run.test_resume import SIX, Stop, stop_at

GROUPS = 8
FRONT = {"skip__front": 1, "skip__tail": 0}
RESIDUAL = {"skip__front": 1, "skip__tail": 2}
STREAM = RESIDUAL | {"skip__tail_mode": "stream"}
MIDDLE = {"train__stream_middle": True}


@contextmanager
def adapter_on_the_first_block() -> Iterator[None]:
    """Let LoRA stand on the first of the trained blocks only; the others are in memory and frozen. Nothing is saved."""
    add_lora = job.add_lora

    def add(model: Any, names: list[str], *args: Any) -> Any:
        block = ".".join(names[0].split(".")[:2])
        return add_lora(model, [name for name in names if name.startswith(f"{block}.")], *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "add_lora", add)
        patch.setattr(job, "save_adapter", lambda *_: None)
        yield


def test_a_streamed_tail_is_a_frozen_one_in_memory(runs: Runs, tmp_path: Path) -> None:
    """The same metrics bytes and adapter tensors, from the same stored features; the residual gives others."""
    cache = {"features__cache": str(tmp_path)}
    with adapter_on_the_first_block(), Written() as written:
        resident = runs(**FRONT, **cache)
    assert written.counts[2] == GROUPS
    with Written() as written:
        streamed = runs(**STREAM, **cache)
    assert written.counts == (0, 0, 0)
    assert streamed.metrics == resident.metrics
    assert streamed.state(4)["state.safetensors"] == resident.state(4)["state.safetensors"]
    with Written() as written:
        residual = runs(**RESIDUAL, **cache)
    assert written.counts == (0, 0, GROUPS)
    assert residual.entries[0]["loss"] == pytest.approx(streamed.entries[0]["loss"], rel=1e-5)  # the adapter is zero
    assert residual.entries[0]["grad_norm"] != pytest.approx(streamed.entries[0]["grad_norm"], rel=1e-3)
    assert {run.header["blockskip.tail_mode"] for run in (residual, streamed)} == {"residual", "stream"}


def test_precompute_ends_at_the_front(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    block = StreamedTransformer.block
    monkeypatch.setattr(
        StreamedTransformer, "block", lambda self, index, *args: seen.append(index) or block(self, index, *args)
    )
    monkeypatch.setattr("blockskip.loading.transformer.run_head", None)
    runs(**STREAM | {"skip__front": 2, "skip__tail": 1}, train__steps=1)
    assert set(seen) == {0, 1}
    seen.clear()
    run = runs(**STREAM | {"skip__front": 0}, train__steps=1)
    assert seen == []
    assert run.result is not None
    assert "precompute" not in {record.name for record in run.result.records}


@pytest.mark.parametrize("settings", [STREAM, STREAM | MIDDLE], ids=["tail", "tail and middle"])
def test_three_and_three_are_six(runs: Runs, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    straight, output = runs.once(**SIX, **STREAM), runs.folder()
    stop_at(monkeypatch, 10, Stop())
    with pytest.raises(Stop):
        runs(output, **SIX, **settings)
    again = runs(output, **SIX, **settings)
    assert again.adapter == straight.adapter
    assert again.metrics == straight.metrics
    assert again.state(6)["state.safetensors"] == straight.state(6)["state.safetensors"]


@pytest.mark.parametrize("base", [{}, {"skip__ratio": 0.0}, {"model__dtype": "bfloat16"}], ids=str)
def test_a_streamed_middle_gives_the_same_bytes(runs: Runs, base: dict[str, Any]) -> None:
    expected = runs.once(**base)
    for changes in (MIDDLE, MIDDLE | {"train__gradient_checkpointing": True}):
        run = runs(**base, **changes)
        assert run.adapter == expected.adapter
        assert run.metrics == expected.metrics


def test_a_run_may_go_on_with_a_streamed_middle_and_not_with_another_tail(
    flux_runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight, output = flux_runs.once(**SIX), flux_runs.folder()
    stop_at(monkeypatch, 10, Stop())
    with pytest.raises(Stop):
        flux_runs(output, **SIX)
    with pytest.raises(UserError, match=r"another skip\.tail_mode"):
        flux_runs(output, **SIX, skip__tail_mode="stream")
    assert flux_runs(output, **SIX, **MIDDLE).adapter == straight.adapter


def test_nothing_of_it_is_left_after_training(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[StreamedBlock]] = []
    stream = job.stream_blocks

    def watched(model: Any, *args: Any, **kwargs: Any) -> None:
        stream(model, *args, **kwargs)
        made.extend(weakref.ref(part) for part in model.modules() if isinstance(part, StreamedBlock))

    monkeypatch.setattr(job, "stream_blocks", watched)
    runs(**STREAM, **MIDDLE, train__steps=1)
    assert len(made) == 3
    assert [reference() for reference in made] == [None] * 3


def test_the_report_says_that_the_tail_was_streamed(flux_runs: Runs) -> None:
    pages = []
    for kind in (STREAM, RESIDUAL):
        page = flux_runs(**kind, train__steps=1, report=True).files["report.html"].decode()
        pages.append(page.replace("\N{NO-BREAK SPACE}", " "))
    for text, counts in (
        ("2 streamed at the tail", [1, 0]), ("2 skipped at the tail", [0, 1]), ("(1 front, 2 tail, streamed)", [1, 0]),
    ):  # fmt: skip
        assert [page.count(text) for page in pages] == counts


def ready(runs: Runs, **changes: Any) -> Any:
    named = runs.settings(output=str(runs.folder()), **changes)
    return prepare(from_flat({SHORT.get(n, n.replace("__", ".")): str(v) if isinstance(v, Path) else v
                              for n, v in named.items()}))  # fmt: skip


def test_a_streamed_middle_and_a_quantised_one_exclude_each_other(flux_runs: Runs) -> None:
    with pytest.raises(UserError, match=r"train\.stream_middle reads the unquantised base and model\.quantization"):
        ready(flux_runs, **MIDDLE, model__quantization="nf4")


def test_a_streamed_tail_goes_with_a_quantised_middle(flux_runs: Runs) -> None:
    pytest.importorskip("bitsandbytes")
    quantized = flux_runs(**STREAM, model__quantization="nf4")
    plain: Run = flux_runs(**STREAM)
    losses = torch.tensor([[entry["loss"] for entry in run.entries] for run in (quantized, plain)])
    assert 0 < (losses[0] - losses[1]).abs().max() < 0.05 * losses[1].max()


def test_states_that_wait_on_disk_give_the_same_run(runs: Runs) -> None:
    """The same metrics bytes; what waited counts as disk space, and is gone; a continued run may wait elsewhere."""
    inside = runs(**RESIDUAL)
    folder: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        put = OnDisk.put
        patch.setattr(OnDisk, "put", lambda self, *args: (put(self, *args), folder.append(self.peak_bytes)))
        outside = runs(**RESIDUAL, features__window_on="disk")
    assert outside.metrics == inside.metrics
    assert inside.result is not None and outside.result is not None
    assert outside.result.disk_bytes - inside.result.disk_bytes == max(folder) > 0
    assert not (outside.result.output / "cache" / "waiting").exists()
    assert may_change("features.window_on")
