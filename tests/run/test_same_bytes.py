"""Nothing that is not a setting of what is learnt changes a byte of what is learnt."""

from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

from blockskip.cli import main
from blockskip.features import precompute
from blockskip.preview import draw
from blockskip.settings import leaves
from blockskip.store.groups import GroupStore
from tests.run.runs import PROMPT, Runs, Written

PREVIEW = {"preview__num_inference_steps": 2, "preview__height": 32, "preview__width": 32}
STEPS, ACCUMULATION = 4, 2


def features_bytes(runs: Runs) -> int:
    """Bytes of the stored features of one group."""
    with Written() as written:
        kept = runs.once(features__keep=True)
    store = GroupStore(kept.output / "cache" / "features")
    assert written.counts[2] in (0, STEPS * ACCUMULATION)
    return store.size() // (STEPS * ACCUMULATION)


def test_two_runs_are_the_same(runs: Runs) -> None:
    plain, again = runs.once(), runs()
    assert again.adapter == plain.adapter
    assert again.metrics == plain.metrics
    assert again.state(STEPS) == plain.state(STEPS)
    assert all(bool(value.any()) for value in plain.tensors.values())


def test_the_order_of_the_keys_does_not_matter(flux_runs: Runs, tmp_path: Path) -> None:
    """Given on the command line from a file whose sections and keys stand in reverse order."""
    plain, output = flux_runs.once(), tmp_path / "out"
    settings = {name.replace("__", "."): value for name, value in flux_runs.settings().items()}
    settings |= {"model.path": str(settings.pop("model")), "data.images": str(settings.pop("images"))}
    settings["data.prompt"] = settings.pop("prompt")
    document: dict[str, dict[str, object]] = {}
    for name, value in sorted(settings.items(), reverse=True):
        section, _, leaf = name.partition(".")
        document.setdefault(section, {})[leaf] = value
    assert set(settings) <= set(leaves())
    file = tmp_path / "reversed.toml"
    file.write_text(tomli_w.dumps(document), encoding="utf-8")
    assert main(["train", "--config", str(file), "--output", str(output)]) == 0
    assert (output / "adapter" / plain.file.name).read_bytes() == plain.adapter
    assert (output / "report.html").is_file()


def test_another_seed_is_another_run(flux_runs: Runs) -> None:
    plain, other = flux_runs.once(), flux_runs(train__seed=1)
    assert other.tensors.keys() == plain.tensors.keys()
    assert all(not torch.equal(other.tensors[name], value) for name, value in plain.tensors.items())
    assert {entry["loss"] for entry in other.entries}.isdisjoint(entry["loss"] for entry in plain.entries)


def test_previews_change_nothing(runs: Runs) -> None:
    plain = runs.once()
    often = runs(preview__prompts=[PROMPT, "a dog"], preview__every=2, preview__images=2, **PREVIEW)
    assert often.adapter == plain.adapter
    assert often.metrics == plain.metrics
    samples = {path.name for path in (often.output / "samples").glob("*.png")}
    steps = (2, STEPS)
    assert samples == {f"step-{s:06d}-{row:02d}-{n}.png" for s in steps for row in range(2) for n in range(2)}
    at_end = runs(preview__prompts=["a dog"], **PREVIEW)
    assert at_end.adapter == plain.adapter
    (drawn,) = (at_end.output / "samples").glob("*.png")
    assert drawn.name == f"step-{STEPS:06d}-00-0.png"
    # Seeds and prompts are drawn alone: the same picture, whatever is drawn with it.
    assert drawn.read_bytes() == (often.output / "samples" / f"step-{STEPS:06d}-01-0.png").read_bytes()
    # Every preview is drawn with its own step's adapter.
    rows = [(often.output / "samples" / f"step-{step:06d}-00-0.png").read_bytes() for step in steps]
    assert len(set(rows)) == len(steps)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyError("name"), MemoryError()], ids=repr)
def test_a_failing_preview_is_told_and_ends_nothing(
    flux_runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(draw, "denoise", fail)
    often = {"preview__every": 2} if isinstance(error, RuntimeError) else {}
    run = flux_runs(preview__prompts=["a dog"], **often, **PREVIEW)
    assert run.adapter == flux_runs.once().adapter
    told = [line for line in capsys.readouterr().out.splitlines() if "the preview at" in line]
    steps = (2, STEPS) if often else (STEPS,)
    assert len(told) == len(steps)
    assert all(f"the preview at step {step} failed" in line for step, line in zip(steps, told, strict=True))
    assert not list(run.output.rglob("*.png"))


def test_a_disk_budget_alternates_and_is_kept(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    one = features_bytes(runs)
    largest = 0
    write, size = GroupStore.write, GroupStore.size

    def watch(store: GroupStore, key: str, *args: object, **kwargs: object) -> int:
        nonlocal largest
        written: int = write(store, key, *args, **kwargs)  # type: ignore[arg-type]
        if store.path(key).parent.name == "features":
            largest = max(largest, size(store))
        return written

    monkeypatch.setattr(GroupStore, "write", watch)
    phases = []
    for groups in (1, 5, 100):  # less than a step; two steps; everything
        largest = 0
        with Written() as written:
            run = runs(features__disk=f"{groups * one + 100}B", features__keep=True)
        assert run.adapter == runs.once().adapter
        assert run.metrics == runs.once().metrics
        assert written.counts[2] == STEPS * ACCUMULATION
        assert largest <= max(groups, ACCUMULATION) * (one + 100)
        phases.append(largest)
    assert phases[0] < phases[1] < phases[2]


def test_a_pool_is_cycled(flux_runs: Runs) -> None:
    one = features_bytes(flux_runs)
    with Written() as written:
        pool = flux_runs(features__pool=3)
    assert written.counts == (1, 3, 3)
    assert pool.adapter != flux_runs.once().adapter
    with Written() as written:
        limited = flux_runs(features__pool=3, features__disk=f"{2 * one + 100}B")
    assert limited.adapter == pool.adapter
    assert limited.metrics == pool.metrics
    assert written.counts[2] > 3  # groups that had to go were computed again


@pytest.mark.parametrize("window", ["1B", "50kB", "1GiB"])
def test_the_window_changes_nothing(runs: Runs, window: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    original = precompute.Window.__call__

    def spy(self: Any, window: list[Any], *args: Any) -> None:
        sizes.append(len(window))
        original(self, window, *args)

    monkeypatch.setattr(precompute.Window, "__call__", spy)
    run = runs(features__window=window, features__keep=True)
    assert run.adapter == runs.once().adapter
    assert sum(sizes) == STEPS * ACCUMULATION
    assert {"1B": max(sizes) == 1, "50kB": 1 < max(sizes) < 8, "1GiB": sizes == [8]}[window], sizes


def test_a_warm_cache_is_used_and_changes_nothing(flux_runs: Runs, tmp_path: Path) -> None:
    cold = flux_runs(features__cache=tmp_path)
    with Written() as written:
        warm = flux_runs(features__cache=tmp_path)
    assert written.counts == (0, 0, 0)
    assert cold.adapter == warm.adapter == flux_runs.once().adapter
    assert warm.metrics == flux_runs.once().metrics


def test_batches_and_checkpointing_are_reproducible(flux_runs: Runs) -> None:
    """Groups of two pictures; activations recomputed in the backward pass are those of the forward pass."""
    changes = {"train__batch_size": 2, "patches__shape": "picture"}
    plain = flux_runs(**changes)
    checkpointed = flux_runs(**changes, train__gradient_checkpointing=True)
    assert checkpointed.tensors.keys() == plain.tensors.keys()
    assert all(torch.equal(checkpointed.tensors[name], value) for name, value in plain.tensors.items())
