"""Random numbers that depend on what they are for, never on when they are drawn."""

from __future__ import annotations

import hashlib

import torch


def derive_seed(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed that is a pure function of the run's seed and a purpose such as ``("noise", 17)``."""
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """A fresh CPU generator for one purpose; no draw from it can shift the draws of another purpose."""
    return torch.Generator("cpu").manual_seed(derive_seed(seed, *purpose))


def gaussian(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Standard normal noise of a shape, float32 on the CPU, a pure function of the seed."""
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float32)
