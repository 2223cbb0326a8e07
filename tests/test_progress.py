"""Progress: plain lines in logs, a bar on a terminal, silence on request."""

from __future__ import annotations

import io
import sys

import pytest

from blockskip import progress as module
from blockskip.progress import clock, progress, quiet, say


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def now(monkeypatch):
    """A clock that the test moves."""
    time = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: time[0])
    monkeypatch.setattr(module, "_output", module._Output())
    monkeypatch.delenv("BLOCKSKIP_QUIET", raising=False)
    return time


def test_a_log_gets_a_line_every_five_seconds_and_one_at_the_end(now, capsys):
    with progress(800, "precompute") as shown:
        for step in range(800):
            now[0] += 0.0625
            shown.advance(note=f"loss {step / 1000:.3f}")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10  # 50 seconds: 9 between, one at the end
    assert lines[0] == "precompute  80/800  10%  0:45 left  loss 0.079"
    assert lines[-1] == "precompute  800/800  100%  in 0:50  loss 0.799"


def test_short_phases_print_their_end_only_and_may_be_empty(now, capsys):
    with progress(0, "encode"):
        pass
    with progress(3, "load") as shown:
        shown.advance(3)
    assert capsys.readouterr().err == "encode  0/0  100%  in 0:00\nload  3/3  100%  in 0:00\n"


def test_a_continued_phase_is_timed_by_what_it_does_itself(now, capsys):
    with progress(100, "train", start=90) as shown:
        now[0] += 10
        shown.advance(5)
        assert shown.left == 10
        shown.advance(5)
    assert capsys.readouterr().err.splitlines()[0] == "train  95/100  95%  0:10 left"


def test_a_long_set_up_does_not_count_for_the_speed(now):
    with progress(100, "train") as shown:
        now[0] += 60
        shown.advance()
        assert shown.left == 60 * 99
        now[0] += 1
        shown.advance()
        assert shown.left == 98


def test_an_interrupted_phase_says_so(now, capsys):
    with pytest.raises(RuntimeError), progress(10, "train") as shown:
        now[0] += 4
        shown.advance(4)
        raise RuntimeError
    assert capsys.readouterr().err == "train  4/10  40%  stopped after 0:04\n"
    with progress(1, "next"):  # the nesting was left
        pass
    assert "next" in capsys.readouterr().err


def test_many_short_inner_phases_do_not_flood_a_log(now, capsys):
    with progress(100, "blocks") as outer:
        for _ in range(100):
            with progress(10, "groups") as inner:
                now[0] += 1
                inner.advance(10)
            outer.advance()
    lines = capsys.readouterr().err.splitlines()
    assert 15 <= len(lines) <= 21 and all(line.startswith("blocks") for line in lines)


@pytest.mark.parametrize("how", ["context", "environment"])
def test_quiet_silences_everything(now, capsys, monkeypatch, how):
    if how == "environment":
        monkeypatch.setenv("BLOCKSKIP_QUIET", "1")
    manager = quiet() if how == "context" else io.StringIO()
    with manager, progress(2, "train") as shown:
        now[0] += 10
        shown.advance()
        say("saved")
    assert capsys.readouterr() == ("", "")
    if how == "context":
        say("loud again")
        assert capsys.readouterr().out == "loud again\n"


def test_a_terminal_gets_a_bar_with_what_how_far_how_long_and_the_note(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.delenv("BLOCKSKIP_QUIET", raising=False)
    with progress(4, "precompute") as shown:
        shown._bar.mininterval = 0
        for _ in range(4):
            with progress(2, "inner") as inner:
                inner.advance(2)
            shown.advance(note="loss\n0.123")
        say("checkpoint saved")
    text = screen.getvalue()
    assert "precompute   50% |" in text and "2/4" in text and "left, loss 0.123" in text
    assert "checkpoint saved\n" in text
    last = text.replace("\n", "\r").split("\r")
    assert any("4/4  in 00:00, loss 0.123" in part for part in last)


def test_a_stream_that_knows_no_emoji_is_no_reason_to_fail(now, monkeypatch):
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    monkeypatch.setattr(sys, "stdout", narrow)
    say("saved \N{DOG FACE} caf\N{LATIN SMALL LETTER E WITH ACUTE}")
    narrow.flush()
    assert narrow.buffer.getvalue().decode("cp1252").strip() == "saved ? caf\N{LATIN SMALL LETTER E WITH ACUTE}"


def test_clock():
    assert [clock(s) for s in (0, 42, 59.6, 725, 3723)] == ["0:00", "0:42", "1:00", "12:05", "1:02:03"]
