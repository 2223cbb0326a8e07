"""Calls that take turns: never two at once, handing over where they say so, and none left behind when one fails."""

import threading

import pytest

from blockskip.loading.turns import Turns


def test_calls_hand_over_in_their_order() -> None:
    turns, seen = Turns(), []

    def call(name: str, steps: int) -> str:
        for step in range(steps):
            seen.append(f"{name}{step}")
            turns.next_turn()
        return name

    assert turns.run([lambda: call("a", 3), lambda: call("b", 1), lambda: call("c", 2)]) == ["a", "b", "c"]
    assert seen == ["a0", "b0", "c0", "a1", "c1", "a2"]
    assert turns.run([lambda: call("d", 2)]) == ["d"]
    assert turns.run([]) == []
    assert seen[6:] == ["d0", "d1"]


def test_two_never_run_at_once() -> None:
    turns, running, most = Turns(), 0, 0

    def call() -> None:
        nonlocal running, most
        for _ in range(50):
            running += 1
            most = max(most, running)
            threading.Event().wait(0.0001)  # any other thread that may run does so now
            running -= 1
            turns.next_turn()

    turns.run([call] * 3)
    assert most == 1


def test_outside_a_call_there_is_no_turn() -> None:
    Turns().next_turn()


def test_what_a_call_raises_is_raised_and_the_others_end() -> None:
    turns, ended, before = Turns(), [], threading.active_count()

    def call(fail: bool) -> None:
        try:
            turns.next_turn()
            if fail:
                raise ValueError("this one")
            turns.next_turn()
            ended.append("after the failure")
        finally:
            ended.append("unwound")

    with pytest.raises(ValueError, match="this one"):
        turns.run([lambda: call(False), lambda: call(True), lambda: call(False)])
    assert ended == ["unwound"] * 3
    assert threading.active_count() == before
    assert turns.run([lambda: 1, lambda: 2]) == [1, 2]


def test_an_interrupt_leaves_nothing_running(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, before, interrupted = Turns(), threading.active_count(), False
    join = threading.Thread.join

    def interrupt_once(thread: threading.Thread, *args: float) -> None:
        nonlocal interrupted
        if not interrupted:
            interrupted = True
            raise KeyboardInterrupt
        join(thread, *args)

    def call() -> None:
        while True:
            turns.next_turn()

    monkeypatch.setattr(threading.Thread, "join", interrupt_once)
    with pytest.raises(KeyboardInterrupt):
        turns.run([call, call])
    assert threading.active_count() == before
