"""Checkpoints: what is read is what was written; damaged ones are passed over; a kill leaves a whole one."""

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from blockskip.training.checkpoints import Checkpoint, latest_checkpoint, save_checkpoint


def checkpoint(step: int, size: int = 50) -> Checkpoint:
    value = torch.full((size,), float(step))
    return Checkpoint(
        step, {"block.0.lora_A.weight": value, "block.0.lora_B.weight": -value},
        {"0.step": torch.tensor(float(step)), "0.exp_avg": value / 2, "10.exp_avg": value / 4}, {"a": "1", "ü": '"'}, 2,
    )  # fmt: skip


def assert_same(found: Checkpoint | None, expected: Checkpoint) -> None:
    assert found is not None
    assert (found.step, found.fingerprint, found.skipped_steps) == (
        expected.step, expected.fingerprint, expected.skipped_steps,
    )  # fmt: skip
    for one, other in ((found.adapter, expected.adapter), (found.optimizer, expected.optimizer)):
        assert one.keys() == other.keys()
        assert all(torch.equal(value, other[name]) and value.dtype == other[name].dtype for name, value in one.items())


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "nothing") is None
    path = save_checkpoint(tmp_path, checkpoint(7), 0)
    assert path == tmp_path / "step-000007"
    assert_same(latest_checkpoint(tmp_path), checkpoint(7))
    save_checkpoint(tmp_path, checkpoint(1_000_000), 0)
    assert_same(latest_checkpoint(tmp_path), checkpoint(1_000_000))
    assert names(tmp_path) == ["step-000007", "step-1000000"]


def test_equal_checkpoints_are_equal_bytes(tmp_path: Path) -> None:
    one, other = (save_checkpoint(tmp_path / name, checkpoint(3), 0) for name in ("a", "b"))
    assert names(one) == names(other) == ["checkpoint.json", "state.safetensors"]
    for name in names(one):
        assert (one / name).read_bytes() == (other / name).read_bytes()


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in range(1, 6):
        save_checkpoint(tmp_path / "two", checkpoint(step), 2)
        save_checkpoint(tmp_path / "all", checkpoint(step), 0)
    assert names(tmp_path / "two") == ["step-000004", "step-000005"]
    assert len(names(tmp_path / "all")) == 5


def test_a_step_saved_again_replaces_itself(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, checkpoint(3), 2)
    other = checkpoint(3)
    other.adapter["block.0.lora_A.weight"] = torch.randn(50)
    save_checkpoint(tmp_path, other, 2)
    assert_same(latest_checkpoint(tmp_path), other)


def _truncate(path: Path) -> None:
    state = path / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-10])


def _flip_a_weight(path: Path) -> None:
    state = path / "state.safetensors"
    content = bytearray(state.read_bytes())
    content[-20] ^= 4
    state.write_bytes(content)


def _empty(path: Path) -> None:
    (path / "state.safetensors").write_bytes(b"")


def _without_manifest(path: Path) -> None:
    (path / "checkpoint.json").unlink()


def _without_state(path: Path) -> None:
    (path / "state.safetensors").unlink()


def _list(path: Path) -> None:
    (path / "checkpoint.json").write_text("[1, 2]", encoding="utf-8")


def _of_another_step(path: Path) -> None:
    path.rename(path.with_name("step-000030"))


def _of_another_format(path: Path) -> None:
    manifest = json.loads((path / "checkpoint.json").read_text(encoding="utf-8"))
    (path / "checkpoint.json").write_text(json.dumps(manifest | {"format": 99}), encoding="utf-8")


def _a_file(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
    path.write_bytes(b"")


@pytest.mark.parametrize(
    "damage",
    [_truncate, _flip_a_weight, _empty, _without_manifest, _without_state, _list, _of_another_step, _of_another_format,
     _a_file],
)  # fmt: skip
def test_a_damaged_one_is_passed_over(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    save_checkpoint(tmp_path, checkpoint(1), 0)
    damage(save_checkpoint(tmp_path, checkpoint(2), 0))
    assert_same(latest_checkpoint(tmp_path), checkpoint(1))


def test_any_flipped_bit_of_the_manifest_is_seen(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, checkpoint(1, 2), 0)
    manifest = save_checkpoint(tmp_path, checkpoint(2, 2), 0) / "checkpoint.json"
    content = manifest.read_bytes()
    for place in range(len(content)):
        for bit in (1, 4):
            manifest.write_bytes(content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :])
            assert_same(latest_checkpoint(tmp_path), checkpoint(1, 2))


def test_junk_names_are_passed_over(tmp_path: Path) -> None:
    good = save_checkpoint(tmp_path, checkpoint(5), 0)
    for name in ("step-xx", "step-", "step-99", "step-000099.bak", "checkpoint-000099", "step--00099", "step-000_99",
                 "checkpoint-old", "my step-000099"):  # fmt: skip
        save_checkpoint(tmp_path / "other", checkpoint(99), 0).rename(tmp_path / name)
    (tmp_path / "step-000100.safetensors").write_bytes(b"")
    (tmp_path / "checkpoint-100.safetensors").write_bytes(b"")
    assert_same(latest_checkpoint(tmp_path), checkpoint(5))
    save_checkpoint(tmp_path, checkpoint(6), 1)
    assert not good.exists()
    assert (tmp_path / "step-xx").exists()
    assert (tmp_path / "checkpoint-old").exists()


def test_what_was_just_saved_is_kept_beside_a_damaged_newer_one(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, checkpoint(10), 1)
    _truncate(save_checkpoint(tmp_path, checkpoint(20), 0))
    assert_same(latest_checkpoint(tmp_path), checkpoint(10))
    save_checkpoint(tmp_path, checkpoint(15), 1)
    assert_same(latest_checkpoint(tmp_path), checkpoint(15))
    assert names(tmp_path) == ["step-000015"]


def test_a_failed_save_leaves_the_earlier_one_and_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from blockskip.training import checkpoints as module

    save_checkpoint(tmp_path, checkpoint(1), 0)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_tensors", full)
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(tmp_path, checkpoint(2), 0)
    assert names(tmp_path) == ["step-000001"]
    assert_same(latest_checkpoint(tmp_path), checkpoint(1))


def _save_for_ever(folder: Path, states: list[Checkpoint], limit: int) -> None:
    for state in states:
        save_checkpoint(folder, state, limit)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a cheap process to kill")
@pytest.mark.parametrize("limit", [1, 2])
def test_a_kill_at_any_time_leaves_a_whole_one(tmp_path: Path, limit: int) -> None:
    random.seed(limit)
    states = [checkpoint(step, 40_000) for step in range(1, 400)]  # made here: a forked child starts no threads
    done, left_behind = 0, 0
    for _ in range(20):
        child = multiprocessing.get_context("fork").Process(
            target=_save_for_ever, args=(tmp_path, states[done:], limit), daemon=True
        )
        child.start()
        deadline = time.monotonic() + 20
        while all(int(path.name[5:]) <= done for path in tmp_path.glob("step-*")) and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(random.uniform(0, 0.03))
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        left_behind += len(list(tmp_path.glob(".step-*.tmp")))
        found = latest_checkpoint(tmp_path)
        assert found is not None
        assert found.step >= done
        assert_same(found, states[found.step - 1])
        assert not list(tmp_path.glob(".*.tmp"))
        done = found.step
    assert left_behind > 0, "no kill met a save"
    assert done > 1
