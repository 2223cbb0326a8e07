"""Rectified flow: noise levels, noising, target and loss (conditional flow matching, unchanged by the paper)."""

from __future__ import annotations

from typing import Literal, get_args

import torch

Distribution = Literal["uniform", "logit-normal"]
DISTRIBUTIONS: tuple[str, ...] = get_args(Distribution)


def shift_sigma(sigma: float, shift: float) -> float:
    """The shifted noise level s * sigma / (1 + (s - 1) * sigma); 0 and 1 stay where they are."""
    return shift * sigma / (1 + (shift - 1) * sigma)


def sample_sigma(
    generator: torch.Generator,
    distribution: Distribution = "uniform",
    shift: float = 1.0,
    mean: float = 0.0,
    std: float = 1.0,
) -> float:
    """One noise level in (0, 1), drawn as float64 and rounded to float32.

    Args:
        generator: a CPU generator; exactly one number is drawn.
        distribution: ``uniform``, or ``logit-normal``: sigmoid of a normal variable of ``mean`` and ``std``.
        shift: moves samples towards noise when above 1 (``shift_sigma``).
    """
    if distribution == "uniform":
        sigma = float(torch.rand((), generator=generator, dtype=torch.float64))
    else:
        normal = float(torch.randn((), generator=generator, dtype=torch.float64))
        sigma = float(torch.sigmoid(torch.tensor(mean + std * normal, dtype=torch.float64)))
    shifted = min(max(shift_sigma(sigma, shift), 1e-5), 1.0)
    return float(torch.tensor(shifted, dtype=torch.float32))


def add_noise(latents: torch.Tensor, noise: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """x_sigma = (1 - sigma) * x + sigma * noise.

    Args:
        latents, noise: (B, ...) of one dtype.
        sigma: (B,) in [0, 1].
    """
    sigma = sigma.reshape(-1, *[1] * (latents.ndim - 1)).to(latents.dtype)
    return (1 - sigma) * latents + sigma * noise


def velocity_target(latents: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """v = noise - x, the derivative of ``add_noise`` by sigma."""
    return noise - latents


def flow_matching_loss(
    velocity: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None
) -> torch.Tensor:
    """The weighted mean over the batch of each sample's mean squared error, a float32 scalar.

    Args:
        velocity, target: (B, ...), compared in float32.
        weight: (B,) float32; None counts every sample once.
    """
    errors = (velocity.float() - target.float()).square().flatten(1).mean(1)
    return errors.mean() if weight is None else (errors * weight).mean()
