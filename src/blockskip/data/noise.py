"""The tensors of a group that are drawn, not read: noise levels, noise and weights, all fixed by the schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from blockskip.seeds import derive_seed, gaussian


class Drawn(Protocol):
    """What of a sample is drawn."""

    @property
    def sigma(self) -> float: ...
    @property
    def noise_seed(self) -> int: ...
    @property
    def weight(self) -> float: ...


def sigmas(samples: Sequence[Drawn]) -> torch.Tensor:
    """(B,) float32."""
    return torch.tensor([sample.sigma for sample in samples], dtype=torch.float32)


def weights(samples: Sequence[Drawn]) -> torch.Tensor:
    """(B,) float32, of the samples in the loss."""
    return torch.tensor([sample.weight for sample in samples], dtype=torch.float32)


def noise(samples: Sequence[Drawn], shape: Sequence[int]) -> torch.Tensor:
    """(B, *shape) float32 standard normal: what the latents are noised with."""
    return torch.stack([gaussian(tuple(shape), sample.noise_seed) for sample in samples])


def posterior_noise(samples: Sequence[Drawn], shape: Sequence[int]) -> torch.Tensor:
    """(B, *shape) float32 standard normal: what latents are drawn from the autoencoder's posterior with."""
    return torch.stack([gaussian(tuple(shape), derive_seed(sample.noise_seed, "posterior")) for sample in samples])
