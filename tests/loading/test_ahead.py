"""Blocks that are fetched before their turn: the right ones, never three at once, and nothing of ours on a CPU."""

import ctypes
import gc
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from blockskip.loading import ahead as module
from blockskip.loading.ahead import (
    PIECE,
    BackAndForth,
    BlockWeights,
    ExpectAhead,
    Expecting,
    ReadAhead,
    expect,
    reads_ahead,
)
from blockskip.loading.source import ModelSource
from blockskip.loading.transformer import StreamedTransformer, empty_transformer
from blockskip.loading.weights import Weights
from tests.families.groups import CPU, forward_inputs, group
from tests.loading.test_streaming import watched_blocks
from tests.method.bases import first


def tensors_of(index: int) -> dict[str, torch.Tensor]:
    return {"index": torch.tensor([index])}


@pytest.mark.parametrize("numbers", [[3], [3, 4], [3, 4, 5, 6]], ids=str)
def test_reading_ahead_never_guesses_wrong_in_training(numbers: list[int]) -> None:
    asked: list[tuple[int, str]] = []

    def read(index: int) -> dict[str, torch.Tensor]:
        asked.append((index, threading.current_thread().name))
        return tensors_of(index)

    ahead, turns = ReadAhead(read, BackAndForth(numbers), CPU), [*numbers, *reversed(numbers)] * 3
    for index in turns:
        assert int(ahead(index)["index"]) == index
    ahead._thread.shutdown()
    assert [index for index, _ in asked] == [*turns, numbers[0]]
    assert [index for index, name in asked if not name.startswith("blockskip-fetch")] == [numbers[0]]


def test_any_order_is_right_and_nothing_is_read_beside_a_wrong_guess() -> None:
    reading = threading.Lock()

    def read(index: int) -> dict[str, torch.Tensor]:
        assert reading.acquire(blocking=False)
        time.sleep(0.001)
        reading.release()
        return tensors_of(index)

    ahead = ReadAhead(read, BackAndForth(range(5)), CPU)
    draw = torch.Generator().manual_seed(2)
    for index in torch.randint(5, (100,), generator=draw).tolist():
        assert int(ahead(index)["index"]) == index


def test_what_the_thread_raises_comes_at_its_turn() -> None:
    def read(index: int) -> dict[str, torch.Tensor]:
        if index == 1:
            raise OSError("the disk is gone")
        return tensors_of(index)

    ahead = ReadAhead(read, BackAndForth(range(3)), CPU)
    ahead(0)
    with pytest.raises(OSError, match="the disk is gone"):
        ahead(1)


def test_the_thread_ends_with_the_model() -> None:
    ahead = ReadAhead(tensors_of, BackAndForth(range(3)), CPU)
    ahead(0)
    (thread,) = ahead._thread._threads
    assert thread.is_alive()
    del ahead
    gc.collect()
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_only_where_copies_run_beside_the_computation_is_read_ahead() -> None:
    assert {name: reads_ahead(torch.device(name)) for name in ("cpu", "cuda", "mps")} == {
        "cpu": False, "cuda": True, "mps": False,
    }  # fmt: skip


def weights_of(source: ModelSource) -> BlockWeights:
    names = source.family.layout.names(empty_transformer(source))
    return BlockWeights(Weights(source.part_folder("transformer")), names, torch.float32, CPU)


def test_the_next_block_is_brought_into_the_cache_of_files(flux: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """With or without the system's advice, the very bytes of its tensors, by a thread, and none behind the last."""
    blocks = weights_of(flux)
    (file,) = set(blocks.weights.files.values())
    asked: list[tuple[str, int, int]] = []

    def advise(descriptor: int, begin: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        assert os.fstat(descriptor).st_ino == file.stat().st_ino
        asked.append((threading.current_thread().name, begin, length))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    monkeypatch.setattr(module, "GAP", 1)  # spans that do not touch are told apart
    ahead = ExpectAhead(blocks, lambda index: 1 if index == 0 else None)
    ahead(0)
    asking = ahead._expecting._asked
    assert asking is not None
    asking.result()
    assert all(name.startswith("blockskip-fetch") for name, *_ in asked)
    stored = b"".join(file.read_bytes()[begin : begin + length] for _, begin, length in asked)
    own = blocks(1)
    assert len(stored) == sum(value.nbytes for value in own.values())
    assert all(value.numpy().tobytes() in stored for value in own.values())
    assert max(length for *_, length in asked) <= PIECE
    ahead(1)
    assert ahead._expecting._asked is asking


def test_without_advice_the_file_is_read(flux: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, read = weights_of(flux), list[tuple[int, int]]()
    places, opened = blocks.weights.places(blocks.stored(1)), Path.open

    class Stream:
        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def __enter__(self) -> "Stream":
            return self

        def __exit__(self, *_: object) -> None:
            self.stream.close()

        def seek(self, place: int) -> None:
            self.stream.seek(place)

        def read(self, count: int) -> bytes:
            begin, found = self.stream.tell(), self.stream.read(count)
            read.append((begin, begin + len(found)))
            return bytes(found)

    monkeypatch.delattr(os, "posix_fadvise")
    monkeypatch.setattr(module, "PIECE", 256)
    monkeypatch.setattr(module, "GAP", 256)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda self, *args, **options: Stream(opened(self, *args, **options)))
        expect(blocks.weights, blocks.stored(1))
    ((_, spans),) = places.items()
    covered = {byte for begin, end in read for byte in range(begin, end)}
    assert covered >= {byte for begin, end in spans for byte in range(begin, end)}
    assert len(covered) <= sum(end - begin for begin, end in spans) + 256 * (len(spans) + 1)


def test_what_cannot_be_fetched_is_passed_over(flux: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = weights_of(flux)
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: (_ for _ in ()).throw(OSError("no")), raising=False)
    expect(blocks.weights, blocks.stored(1))


def test_a_slow_disk_gets_no_queue(flux: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, free = list[str](), threading.Event()

    def slow(weights: Weights, names: Sequence[str]) -> None:
        asked.extend(names)
        free.wait(10)

    monkeypatch.setattr(module, "expect", slow)
    expecting = Expecting(weights_of(flux).weights)
    for name in ("one", "two", "three"):
        expecting.soon([name])
    free.set()
    assert expecting._asked is not None
    expecting._asked.result()
    expecting.soon(["four"])
    expecting._asked.result()
    assert asked == ["one", "four"]


def resident(file: Path) -> float:
    """The share of a file that is in the system's cache."""
    length = file.stat().st_size
    pages = -(-length // mmap.PAGESIZE)
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), length, prot=mmap.PROT_READ | mmap.PROT_WRITE,
                                              flags=mmap.MAP_PRIVATE) as mapped:  # fmt: skip
        found, start = (ctypes.c_ubyte * pages)(), ctypes.c_char.from_buffer(mapped)
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(length), found)
        del start
    if failed:
        pytest.skip("this system does not tell what is in its cache of files")
    return sum(value & 1 for value in found) / pages


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system takes no advice")
def test_a_large_block_is_in_the_cache_as_a_whole(tmp_path: Path) -> None:
    """Also where one request is more than the system would fetch by itself."""
    file = tmp_path / "model.safetensors"
    save_file({"block.0.weight": torch.zeros(64 * 2**20, dtype=torch.uint8)}, file)
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident(file) > 0.1:
        pytest.skip("this file system does not forget")
    expecting = Expecting(Weights(tmp_path))
    expecting.soon(["block.0.weight"])
    for _ in range(600):
        if (share := resident(file)) > 0.99:
            break
        time.sleep(0.1)
    assert share > 0.99


@pytest.mark.parametrize(("device_of_its_own", "copied"), [(False, True), (True, True), (True, False)])
def test_a_streamed_pass_has_one_block_or_two_in_memory_and_reads_each_once(
    flux: ModelSource, monkeypatch: pytest.MonkeyPatch, device_of_its_own: bool, copied: bool
) -> None:
    monkeypatch.setattr(module, "reads_ahead", lambda device: device_of_its_own)
    streamed = StreamedTransformer(flux, torch.float32, CPU, read_ahead=copied)
    inputs = forward_inputs(flux, group(flux))
    calls: list[Callable[[], dict[str, object]]] = [lambda: inputs, lambda: inputs]
    names = flux.family.layout.names(empty_transformer(flux))
    with watched_blocks() as blocks, torch.no_grad():
        outputs = [first(output) for _, output, _ in streamed.run(calls)]
    assert torch.equal(outputs[0], outputs[1])
    assert len(blocks.seen) == len(names)  # also with a thread nothing is read behind the last block
    assert {name for seen in blocks.seen for name in seen} == set(names)
    assert max(map(len, blocks.seen)) <= 1 + (device_of_its_own and copied)
