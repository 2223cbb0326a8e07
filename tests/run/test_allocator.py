"""Freed host memory goes back to the system where that was wanted, and by default where there is a budget or a GPU."""

import platform
import subprocess
import sys
from typing import Any

import pytest
import torch

from blockskip.run import planned
from blockskip.settings import from_flat

#: Prints the bytes that a process still holds of freed blocks with holes between them, in whole MiB.
HOLES = """
import sys, psutil, torch
from blockskip.memory import return_freed
if sys.argv[1] == "return": assert return_freed()
del_me = torch.ones(2**23 - 2**12); del del_me  # after this glibc maps no block below 32 MiB
before = psutil.Process().memory_full_info().uss
blocks = [torch.ones(2**18 + number % 7) for number in range(100)]
del blocks[::2]
print((psutil.Process().memory_full_info().uss - before) // 2**20 - 50)
"""


def _held(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", HOLES, how], capture_output=True, check=True, text=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc")
def test_freed_blocks_between_others_are_returned() -> None:
    assert _held("keep") > 40
    assert _held("return") < 5


@pytest.mark.parametrize(
    ("values", "device", "wanted"),
    [
        ({}, "cpu", False),
        ({}, "cuda", True),
        ({"memory.host": "1GiB"}, "cpu", True),
        ({"memory.device": "1GiB"}, "cpu", True),
        ({"memory.disk": "1GiB"}, "cpu", False),
        ({"memory.return_freed": True}, "cpu", True),
        ({"memory.return_freed": False, "memory.host": "1GiB"}, "cuda", False),
    ],
)
def test_it_is_done_with_a_budget_and_with_a_gpu(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], device: str, wanted: bool
) -> None:
    monkeypatch.setattr(planned, "return_freed", lambda: True)
    assert planned.hold_memory(from_flat(values), torch.device(device)) is wanted
