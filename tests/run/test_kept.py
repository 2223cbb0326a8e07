"""Runs whose front and tail stay in memory, frozen and without LoRA: nothing is stored, and nothing is approximate."""

from typing import Any

import pytest

from blockskip.errors import UserError
from blockskip.run import job
from tests.run.runs import Runs, Written
from tests.run.test_resume import SIX, Stop, stop_at

ENDS = {"skip__front": 1, "skip__tail": 2}
EXACT = ENDS | {"skip__tail_mode": "stream"}
KEPT = ENDS | {"skip__front_mode": "keep", "skip__tail_mode": "keep"}


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The blocks that each model for training was loaded without."""
    found: list[tuple[int, ...]] = []
    load = job.load_transformer

    def watched(source: Any, skip: Any, *args: Any) -> Any:
        found.append(tuple(skip))
        return load(source, skip, *args)

    monkeypatch.setattr(job, "load_transformer", watched)
    return found


@pytest.mark.parametrize(
    ("modes", "features", "absent"),
    [
        ({"skip__front_mode": "keep", "skip__tail_mode": "keep"}, 0, ()),
        ({"skip__front_mode": "keep", "skip__tail_mode": "stream"}, 0, (2, 3)),
        ({"skip__front_mode": "features", "skip__tail_mode": "keep"}, 8, (0,)),
    ],
    ids=["both", "front", "tail"],
)
def test_kept_blocks_give_what_features_and_a_streamed_tail_give(
    runs: Runs, loaded: list[tuple[int, ...]], modes: dict[str, str], features: int, absent: tuple[int, ...]
) -> None:
    """Losses and gradients' norms of all steps, adapter and optimiser: the same bytes."""
    expected = runs.once(**EXACT)
    loaded.clear()
    with Written() as written:
        kept = runs(**ENDS, **modes)
    assert loaded == [absent]
    assert written.counts[2] == features
    assert kept.metrics == expected.metrics
    assert kept.state(4)["state.safetensors"] == expected.state(4)["state.safetensors"]
    assert kept.tensors.keys() == expected.tensors.keys()
    assert kept.header["blockskip.front_mode"] == modes["skip__front_mode"]
    residual = runs.once(**ENDS)
    assert residual.entries[0]["grad_norm"] != pytest.approx(kept.entries[0]["grad_norm"], rel=1e-3)


def test_a_kept_front_goes_with_a_tail_s_residual(runs: Runs) -> None:
    """What is stored of the tail is then a key of its own; the run is the method's, bit for bit."""
    with Written() as written:
        kept = runs(**ENDS, skip__front_mode="keep")
    assert written.counts[2] == 8
    assert kept.metrics == runs.once(**ENDS).metrics


def test_three_and_three_are_six_with_the_same_modes_alone(flux_runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    straight, output = flux_runs.once(**SIX, **KEPT), flux_runs.folder()
    stop_at(monkeypatch, 10, Stop())
    with pytest.raises(Stop):
        flux_runs(output, **SIX, **KEPT)
    with pytest.raises(UserError, match=r"another skip\.front_mode"):
        flux_runs(output, **SIX, **KEPT | {"skip__front_mode": "features"})
    again = flux_runs(output, **SIX, **KEPT)
    assert again.adapter == straight.adapter
    assert again.state(6)["state.safetensors"] == straight.state(6)["state.safetensors"]


def test_kept_blocks_are_counted_as_kept(flux_runs: Runs) -> None:
    counts = {}
    for name, settings in {"plain": {"skip__ratio": 0.0}, "kept": KEPT, "skipped": ENDS, "streamed": EXACT}.items():
        counts[name] = flux_runs.prepared(flux_runs.folder(), **settings).counts
    assert (counts["kept"].skipped, counts["kept"].kept) == (0, counts["plain"].kept)
    assert counts["skipped"] == counts["streamed"]
    assert counts["kept"].trained == counts["skipped"].trained < counts["plain"].trained


def test_a_rule_needs_blocks_to_stand_in_for(flux_runs: Runs) -> None:
    with pytest.raises(UserError, match=r'skip\.rule = "none" has no blocks to stand in for'):
        flux_runs.prepared(flux_runs.folder(), **KEPT, skip__rule="none")


def test_the_report_says_what_was_kept(flux_runs: Runs) -> None:
    page = flux_runs(**KEPT, train__steps=1, report=True).files["report.html"].decode()
    page = page.replace("\N{NO-BREAK SPACE}", " ")
    assert "1 kept at the front, 1 trained, 2 kept at the tail" in page
    assert "0 of 4 (1 front, kept, 2 tail, kept)" in page
