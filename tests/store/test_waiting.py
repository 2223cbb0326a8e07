"""What waits in files comes back as it was, in the memory of nobody meanwhile, and leaves nothing behind."""

import os
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from blockskip.errors import RunError
from blockskip.store.waiting import on_disk
from blockskip.waiting import InMemory, Waiting

Pair = namedtuple("Pair", "one other")


def trees() -> dict[str, Any]:
    base = torch.arange(24.0).reshape(4, 6)
    return {
        "state": {"image": base, "text": base.to(torch.bfloat16)},
        "nested": [(print, Pair(base.T, None)), (len, [base > 3, base.to(torch.complex64), "words"])],
        "view": {"row": base[1], "expanded": base[:1].expand(4, 6)},
        "empty": {"nothing": base[:0], "scalar": torch.tensor(2.5)},
    }


def flat(tree: Any) -> tuple[list[Any], Any]:
    return torch.utils._pytree.tree_flatten(tree)


def assert_same(found: Any, expected: Any) -> None:
    (values, spec), (others, other) = flat(found), flat(expected)
    assert spec == other
    for value, original in zip(values, others, strict=True):
        if isinstance(original, torch.Tensor):
            assert value.dtype == original.dtype and torch.equal(value, original)
        else:
            assert value is original


@pytest.mark.parametrize("name", list(trees()))
@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_a_tree_comes_back_as_it_was(tmp_path: Path, kind: str, name: str) -> None:
    expected = trees()[name]
    with on_disk(tmp_path) as files:
        waiting: Waiting = files if kind == "disk" else InMemory()
        waiting.put(3, name, {"other": torch.zeros(2)})
        waiting.put(3, name, expected)
        waiting.put(4, name, trees()["empty"])
        assert_same(waiting.get(3, name), expected)
        assert_same(waiting.take(3, name), expected)
        assert waiting.get(3, name) is waiting.take(3, name) is waiting.get(5, name) is None
        assert_same(waiting.get(4, name), trees()["empty"])


def test_a_file_holds_a_tensor_and_not_what_it_looks_at(tmp_path: Path) -> None:
    with on_disk(tmp_path) as waiting:
        waiting.put(0, "row", torch.zeros(1000, 1000)[5])
        assert 4000 < waiting.peak_bytes < 8000
        waiting.put(1, "row", torch.zeros(1000))
        waiting.take(0, "row")
        waiting.put(2, "row", torch.zeros(1000))
        assert 8000 < waiting.peak_bytes < 14000


def test_memory_moves_to_its_device() -> None:
    waiting = InMemory(torch.device("meta"))
    waiting.put(0, "a", {"x": torch.zeros(2)})
    assert waiting.get(0, "a")["x"].is_meta


def test_the_folder_goes_in_the_end_and_what_a_killed_process_left_goes_at_the_start(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, torch\nfrom blockskip.store.waiting import on_disk\n"
        f"with on_disk(pathlib.Path({str(tmp_path)!r})) as waiting:\n"
        "    waiting.put(0, 'a', torch.zeros(3))\n    os._exit(1)"
    )
    subprocess.run([sys.executable, "-c", program], check=False)
    (left,) = tmp_path.iterdir()
    assert sorted(path.name for path in left.iterdir()) == ["0-a", "open"]
    alive = tmp_path / f".waiting.{os.getpid()}-{'0' * 32}.tmp"
    alive.mkdir()
    with pytest.raises(KeyError), on_disk(tmp_path) as waiting:
        waiting.put(0, "a", torch.zeros(3))
        assert not left.exists()
        assert len(list(tmp_path.iterdir())) == 2
        raise KeyError
    assert list(tmp_path.iterdir()) == [alive]


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be used for waiting states"), on_disk(tmp_path / "file"):
        pass
