"""One phase's weights in memory at a time: what a phase held is gone before the next one loads anything."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import nn

from blockskip.loading import transformer
from blockskip.loading.source import ModelSource
from blockskip.preview import draw
from blockskip.run import job
from tests.run.runs import Runs


class Alive:
    """Weak references to modules by part; ``now`` are the parts of which one is alive."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, weakref.ref[nn.Module]]] = []
        self.log: list[tuple[str, set[str]]] = []

    def before(self, part: str) -> None:
        """Note what is alive when a part is about to be loaded. Nothing is collected here: that is the run's task."""
        self.log.append((part, {name for name, reference in self.seen if reference() is not None}))

    def add(self, part: str, module: Any) -> None:
        """A part was loaded."""
        if isinstance(module, nn.Module):
            self.seen += [(part, weakref.ref(item)) for item in module.modules()]

    def during(self, part: str) -> set[str]:
        """Everything that was alive at any loading of a part."""
        return set().union(*(alive for name, alive in self.log if name == part))


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> Alive:
    found = Alive()
    load, block, inner = ModelSource.load, transformer.StreamedTransformer.block, transformer._load

    def watched_load(source: ModelSource, part: str, *args: Any) -> Any:
        found.before(part)
        module = load(source, part, *args)
        found.add(part, module)
        return module

    @contextmanager
    def watched_block(streamed: Any, index: int, *args: Any) -> Iterator[nn.Module]:
        found.before("block")
        with block(streamed, index, *args) as module:
            found.add("block", module)
            yield module

    def watched_inner(source: Any, skip: Any, *args: Any) -> Any:
        part = "frame" if skip is None else "middle" if skip else "whole"
        found.before(part)
        made = inner(source, skip, *args)
        found.add(part, made[0])
        return made

    monkeypatch.setattr(ModelSource, "load", watched_load)
    monkeypatch.setattr(transformer.StreamedTransformer, "block", watched_block)
    monkeypatch.setattr(transformer, "_load", watched_inner)
    assert job.load_transformer is draw.load_transformer is transformer.load_transformer
    return found


@pytest.mark.parametrize("family", ["flux", "sana"])
@pytest.mark.parametrize("stream", [False, True])
def test_phases_leave_nothing_behind(request: pytest.FixtureRequest, alive: Alive, family: str, stream: bool) -> None:
    """Two stretches of precompute and training with a preview after each: every phase comes after every other one.

    The disk budget lets each stretch precompute for itself.
    """
    runs: Runs = request.getfixturevalue(f"{family}_runs")
    run = runs(
        train__steps=2, preview__prompts=["a dog"], preview__every=1, preview__num_inference_steps=1,
        preview__height=32, preview__width=32, preview__stream=stream, features__disk="1B",
    )  # fmt: skip
    assert run.result is not None
    encoders = ["text_encoder", "text_encoder_2"] if family == "flux" else ["text_encoder"]
    loads = [name for name, _ in alive.log]
    drawn = ["frame"] + ["block"] * 4 if stream else ["whole"]
    texts = [name for part in encoders for name in (part.replace("text_encoder", "tokenizer"),)] + encoders
    preview = [*texts, *drawn, "scheduler", "vae"]
    precompute = ["frame"] + ["block"] * 5  # block 0 tells how large a group is, then all groups go through the four
    order = ["scheduler", *texts, "vae", *precompute, "middle", *preview, *precompute, "middle", *preview]
    assert sorted(loads) == sorted(order)
    for part in (*encoders, "vae", "middle", "whole"):
        assert alive.during(part) == set(), part
    assert alive.during("frame") == set()
    assert alive.during("block") == {"frame"}  # one block at a time, in the frame of embedders and head
    assert all(reference() is None for _, reference in alive.seen)


def test_it_is_seen_when_something_is_kept(flux_runs: Runs, alive: Alive, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail: an autoencoder that someone holds on to is found at the next load."""
    held, load = [], ModelSource.load

    def keep(source: ModelSource, part: str, *args: Any) -> Any:
        module = load(source, part, *args)
        held.append(module)
        return module

    monkeypatch.setattr(ModelSource, "load", keep)
    flux_runs(train__steps=1)
    assert alive.during("middle") == {"text_encoder", "text_encoder_2", "vae"}


def test_no_parameter_of_a_skipped_block_is_loaded_for_training(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[set[str]] = []
    add_lora = job.add_lora

    def add(model: nn.Module, *args: Any) -> Any:
        names.append(set(model.state_dict()))
        return add_lora(model, *args)

    monkeypatch.setattr(job, "add_lora", add)
    run = runs(train__steps=1)
    assert run.result is not None
    prepared = run.result.prepared
    layout = prepared.source.family.layout
    blocks = layout.names(transformer.empty_transformer(prepared.source))
    assert prepared.split.front and prepared.split.tail
    for index, block in enumerate(blocks):
        there = any(name.startswith(f"{block}.") for name in names[0])
        assert there == (index in prepared.split.middle(prepared.num_blocks)), block
