"""Phases see the memory that is really taken, and keep private and mapped bytes apart."""

from __future__ import annotations

import mmap
import subprocess
import sys
import threading
import time

import pytest
import torch

from blockskip import measure
from blockskip.measure import Meter, PhaseRecord, from_json, to_json
from blockskip.memory import release

MB = 1_000_000
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def memory_is_given_back() -> None:
    """What earlier tests freed goes back to the system first: memory that is used again would not be seen as new."""
    release()


def taken(size: int) -> mmap.mmap:
    """Private memory of its own, every page in use; `close` gives it back, whatever the C library keeps for itself."""
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for place in range(0, size, mmap.PAGESIZE):
        block[place] = 1
    return block


linux = pytest.mark.skipif(sys.platform != "linux", reason="private and mapped are told apart on Linux")


def test_an_allocation_is_seen_within_five_percent():
    meter = Meter(CPU)
    with meter.phase("big"):
        block = taken(200 * MB)
    block.close()
    with meter.phase("small"):
        pass
    big, small = meter.records()
    assert big.host_private_peak == pytest.approx(200 * MB, rel=0.05)
    assert big.host_peak == pytest.approx(200 * MB, rel=0.05)
    assert small.host_private_peak < 20 * MB


@linux
def test_what_is_freed_before_the_end_is_seen():
    """In a process of its own: the kernel's record of the peak, which is read here, never falls."""
    script = """
import torch
from blockskip.measure import Meter
meter = Meter(torch.device("cpu"))
with meter.phase("short"):
    block = torch.ones(200 * 2**20, dtype=torch.uint8)
    del block
print(meter.records()[0].host_private_peak)
"""
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert int(printed) == pytest.approx(200 * MB, rel=0.05)


@linux
def test_a_mapped_file_counts_as_mapped_only(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(bytes(60 * MB))
    meter = Meter(CPU)
    with meter.phase("map"), open(path, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as view:
        assert sum(view[:: mmap.PAGESIZE]) == 0
        time.sleep(0.05)
    record = meter.records()[0]
    assert record.host_mapped_peak == pytest.approx(60 * MB, rel=0.05)
    assert record.host_private_peak < 6 * MB
    assert record.host_peak == pytest.approx(60 * MB, rel=0.05)


@linux
def test_the_kernels_own_record_covers_what_lives_now():
    assert sum(measure.host_memory()) <= measure._highest_ever() + MB


@pytest.mark.parametrize("record_set_in_this_phase", [True, False])
def test_a_peak_between_two_samples_is_taken_from_the_kernel(monkeypatch, record_set_in_this_phase):
    meter = Meter(CPU)
    highest = [meter.baseline_bytes if record_set_in_this_phase else meter.baseline_bytes + 500 * MB]
    monkeypatch.setattr(measure, "_highest_ever", lambda: highest[0])
    with meter.phase("work"):
        block = taken(50 * MB)
        highest[0] = meter.baseline_bytes + 500 * MB
    block.close()
    expected = 500 * MB if record_set_in_this_phase else 50 * MB
    assert meter.records()[0].host_private_peak == pytest.approx(expected, rel=0.05)
    assert meter.records()[0].host_peak == pytest.approx(expected, rel=0.05)


def test_repeated_phases_are_merged_and_survive_json():
    first = PhaseRecord("train", 2.0, 10, 50, 7, 9, host_peak=55)
    second = PhaseRecord("train", 3.0, 30, 20, 5, 11, host_peak=45)
    meter = Meter(CPU)
    meter.merge([first, PhaseRecord("encode", 1.0, 1, 1)])
    meter.merge([second])
    assert meter.records() == [PhaseRecord("train", 5.0, 30, 50, 7, 11, host_peak=55), PhaseRecord("encode", 1.0, 1, 1)]
    assert from_json(to_json(meter.records())) == meter.records()
    with pytest.raises(ValueError, match="no phase records"):
        from_json('[{"name": "train"}]')


def test_seconds_add_and_an_error_keeps_the_record():
    meter = Meter(CPU)
    with meter.phase("train"):
        time.sleep(0.03)
    with pytest.raises(RuntimeError), meter.phase("train"):
        time.sleep(0.03)
        raise RuntimeError
    (record,) = meter.records()
    assert 0.06 <= record.seconds < 0.5
    assert not [thread for thread in threading.enumerate() if thread.name == "blockskip-meter"]


def test_what_ended_last_is_known_and_told_unless_it_failed():
    told = []
    meter = Meter(CPU, told.append)
    assert meter.last is None
    with meter.phase("train"):
        block = taken(50 * MB)
    block.close()
    assert told == [meter.last]
    with meter.phase("train"):
        pass
    assert [record.name for record in told] == ["train", "train"]
    assert told[1].host_peak < 10 * MB < told[0].host_peak  # what it took this time
    with pytest.raises(MemoryError), meter.phase("preview"):
        block = taken(30 * MB)
        raise MemoryError
    block.close()
    assert meter.last.name == "preview" and meter.last.host_peak == pytest.approx(30 * MB, rel=0.05)
    assert len(told) == 2


def test_an_outer_phase_sees_what_an_inner_one_took():
    meter = Meter(CPU)
    with meter.phase("outer"):
        with meter.phase("inner"):
            block = taken(100 * MB)
        block.close()
    inner, outer = meter.records()
    assert (inner.name, outer.name) == ("inner", "outer")
    assert outer.host_private_peak >= inner.host_private_peak > 90 * MB
    assert outer.seconds >= inner.seconds


def test_cuda_peaks_are_reset_for_each_phase_and_kept_for_the_outer_one(monkeypatch):
    state = {"now": 100, "peak": 100}

    def allocate(change):
        state["now"] += change
        state["peak"] = max(state["peak"], state["now"])

    fakes = {
        "init": lambda: None,
        "synchronize": lambda device: None,
        "reset_peak_memory_stats": lambda device: state.update(peak=state["now"]),
        "max_memory_allocated": lambda device: state["peak"],
        "max_memory_reserved": lambda device: 2 * state["peak"],
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    meter = Meter(torch.device("cuda"))
    with meter.phase("outer"):
        allocate(900), allocate(-900)
        with meter.phase("inner"):
            allocate(50), allocate(-50)
    with meter.phase("after"):
        allocate(10), allocate(-10)
    found = {record.name: (record.device_allocated_peak, record.device_reserved_peak) for record in meter.records()}
    assert found == {"inner": (150, 300), "outer": (1000, 2000), "after": (110, 220)}


def test_apple_gpus_are_sampled(monkeypatch):
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 5)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 8)
    meter = Meter(torch.device("mps"))
    with meter.phase("train"):
        pass
    assert (meter.records()[0].device_allocated_peak, meter.records()[0].device_reserved_peak) == (5, 8)


def test_without_linux_everything_resident_is_private(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    private, mapped = measure.host_memory()
    assert private > 50 * MB and mapped == 0
    assert measure._highest_ever() == 0


def test_a_sample_costs_less_than_one_percent_of_the_interval():
    meter = Meter(CPU)
    before = time.thread_time()
    for _ in range(300):
        meter._observe(sampling=True)
    assert (time.thread_time() - before) / 300 < 0.01 * measure.INTERVAL
