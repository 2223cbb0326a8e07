"""Runs that skip blocks in the middle of the model."""

import pytest

from blockskip.errors import UserError
from tests.run.runs import Runs, Written
from tests.run.test_resume import SIX, Stop, stop_at

INSIDE = {"skip__middle": 2}


def test_it_is_the_whole_model_until_something_was_learnt(runs: Runs) -> None:
    with Written() as written:
        inside = runs(**INSIDE)
    assert written.counts[2] == 8
    whole, without = runs.once(skip__ratio=0.0), runs(**INSIDE, skip__rule="none")
    first = [run.entries[0]["loss"] for run in (whole, inside, without)]
    assert first[1] == pytest.approx(first[0], rel=1e-6)
    assert abs(first[2] - first[0]) > 1e-4 * first[0]
    assert inside.entries[-1]["loss"] != whole.entries[-1]["loss"]


def test_where_the_run_lies_is_part_of_the_key(runs: Runs) -> None:
    cache = {"features__cache": str(runs.folder()), "skip__middle": 1, "train__steps": 1}
    for start, count in ((1, 2), (1, 0), (2, 2)):
        with Written() as written:
            runs(**cache, skip__middle_start=start)
        assert written.counts[2] == count


def test_three_and_three_are_six(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    straight, output = runs.once(**SIX, **INSIDE), runs.folder()
    stop_at(monkeypatch, 10, Stop())
    with pytest.raises(Stop):
        runs(output, **SIX, **INSIDE)
    with pytest.raises(UserError, match=r"another skip\.middle"):
        runs(output, **SIX, skip__middle=1)
    again = runs(output, **SIX, **INSIDE, train__stream_middle=True)
    assert again.adapter == straight.adapter
    assert again.state(6)["state.safetensors"] == straight.state(6)["state.safetensors"]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"skip__middle": 3}, "leave none to train before or after"),
        ({"skip__middle": 1, "skip__front": 1}, r"skip\.front and skip\.tail must be 0"),
        ({"skip__middle_start": 1}, r"skip\.middle_start places the blocks that skip\.middle counts"),
        ({"skip__middle": 1, "skip__tail_mode": "keep"}, r"skip\.middle leaves no front and no tail"),
    ],
)
def test_what_makes_no_sense_is_told(flux_runs: Runs, settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        flux_runs.prepared(flux_runs.folder(), **settings)


def test_the_report_shows_it(flux_runs: Runs) -> None:
    run = flux_runs(**INSIDE, train__steps=1, report=True)
    page = run.files["report.html"].decode().replace("\N{NO-BREAK SPACE}", " ")
    assert "1 trained, 2 skipped, 1 trained" in page
    assert "2 of 4 (1 to 2)" in page
    assert page.count('fill="none" stroke-dasharray="3 2"') == 2
    assert run.result is not None
    assert run.result.prepared.counts.skipped > 0
