"""Tensors that are not there yet: what is computed with them is what would be computed with their values."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from blockskip.loading.unread import Unread, unread_tensors

COMPUTED: dict[str, Callable[[Any, Any], Any]] = {
    "chunk": lambda a, b: torch.chunk(a, 3, dim=0)[1],
    "method": lambda a, b: a.chunk(2, dim=1)[1],
    "cat": lambda a, b: torch.cat([b, a.chunk(2)[0]], dim=0),
    "swapped": lambda a, b: torch.cat(a.chunk(2)[::-1]),
    "split": lambda a, b: torch.split(a, (1, 2, 3), dim=0)[2],
    "split, method": lambda a, b: a.split([4, 2])[1],
    "split, another dimension": lambda a, b: torch.split(a, [1, 3], 1)[0],
    "reshape": lambda a, b: a.reshape(4, -1),
    "part": lambda a, b: a[2:5],
    "transposed": lambda a, b: a.T.contiguous(),
    "itself": lambda a, b: a.contiguous(),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_what_is_computed_is_read_alone(name: str) -> None:
    real = torch.randn(6, 4), torch.randn(2, 4).half()
    reads = []

    def make(value: torch.Tensor) -> torch.Tensor:
        reads.append(value.shape)
        return value

    unread = [Unread.of(value.shape, value.dtype, lambda value=value: make(value)) for value in real]
    found, expected = COMPUTED[name](*unread), COMPUTED[name](*real)
    assert isinstance(found, Unread) and found.device.type == "meta" and not reads
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(found.read(), expected) and not isinstance(found.read(), Unread)
    assert reads


def test_sizes_of_another_width_are_taken_in_proportion() -> None:
    """As converters have them: the parts of FLUX.1 at its own width, of a model of another one."""
    value = torch.randn(7 * 4, 3)
    parts = torch.split(Unread.of(value.shape, value.dtype, lambda: value), (3072, 3072, 3072, 12288), dim=0)
    assert all(torch.equal(part.read(), other) for part, other in zip(parts, value.split((4, 4, 4, 16)), strict=True))
    with pytest.raises(RuntimeError):
        torch.split(Unread.of((8, 3), torch.float32, lambda: value), (3, 3, 1), dim=0)


def test_files_of_both_kinds_are_known_without_their_values(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 4).bfloat16(), "b": torch.ones(2, dtype=torch.float8_e4m3fn), "c": torch.tensor(1.5)}
    save_file(tensors, tmp_path / "x.safetensors")
    torch.save({"state_dict": {"state_dict": tensors}, "step": 3}, tmp_path / "x.pth")
    for file in tmp_path.iterdir():
        found = unread_tensors(file)
        assert {name: (value.shape, value.dtype) for name, value in found.items()} == {
            name: (value.shape, value.dtype) for name, value in tensors.items()
        }
        assert all(torch.equal(value.read().float(), tensors[name].float()) for name, value in found.items())
