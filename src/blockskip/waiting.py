"""Where tensors wait between two blocks: in memory (here), or on disk (``store.waiting``)."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree


class Waiting(Protocol):
    """Trees (dicts, lists, tuples) of tensors and other values, by the number of a call and a name."""

    def put(self, call: int, name: str, tree: Any) -> None:
        """Let a tree wait, in the place of what had its name."""

    def get(self, call: int, name: str) -> Any:
        """The tree that waits; None where there is none."""

    def take(self, call: int, name: str) -> Any:
        """The tree that waited, and waits no more; None where there was none."""


class InMemory:
    """Trees wait as they are, their tensors on a device.

    Args:
        device: where tensors wait; default: where they are.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device, self._trees = device, dict[tuple[int, str], Any]()

    def put(self, call: int, name: str, tree: Any) -> None:
        """Let a tree wait."""
        if self._device is not None:
            tree = pytree.tree_map_only(torch.Tensor, lambda value: value.to(self._device), tree)
        self._trees[call, name] = tree

    def get(self, call: int, name: str) -> Any:
        """The tree that waits."""
        return self._trees.get((call, name))

    def take(self, call: int, name: str) -> Any:
        """The tree that waited."""
        return self._trees.pop((call, name), None)
