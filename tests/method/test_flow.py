"""Noise levels against their closed forms, and the identities of rectified flow."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockskip.method.flow import (
    Distribution,
    add_noise,
    flow_matching_loss,
    sample_sigma,
    shift_sigma,
    velocity_target,
)


def normal_cdf(value: float) -> float:
    return (1 + math.erf(value / math.sqrt(2))) / 2


@pytest.mark.parametrize(
    ("distribution", "shift", "mean", "std", "count"),
    [
        ("logit-normal", 1.0, 0.0, 1.0, 100_000),
        ("logit-normal", 3.0, 0.5, 0.8, 30_000),
        ("uniform", 1.0, 0.0, 1.0, 30_000),
        ("uniform", 3.0, 0.0, 1.0, 30_000),
    ],
)
def test_sigma_has_the_distribution_s_closed_form(
    distribution: Distribution, shift: float, mean: float, std: float, count: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = sorted(sample_sigma(generator, distribution, shift, mean, std) for _ in range(count))

    def cdf(sigma: float) -> float:
        plain = sigma / (shift - (shift - 1) * sigma)  # the level before the shift
        if distribution == "uniform":
            return plain
        return normal_cdf((math.log(plain / (1 - plain)) - mean) / std) if plain < 1 else 1.0

    distances = [max(cdf(one) - i / count, (i + 1) / count - cdf(one)) for i, one in enumerate(drawn)]
    assert max(distances) < 0.01
    assert 0 < drawn[0] < drawn[-1] <= 1


def test_one_number_is_drawn_and_it_is_float32() -> None:
    generator, other = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    first = sample_sigma(generator)
    torch.rand((), generator=other, dtype=torch.float64)
    assert torch.equal(generator.get_state(), other.get_state())
    assert float(torch.tensor(first, dtype=torch.float32)) == first
    assert sample_sigma(torch.Generator().manual_seed(3)) == first != sample_sigma(torch.Generator().manual_seed(4))


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0.1, 10))
def test_the_shift_keeps_the_ends_and_the_order(one: float, other: float, shift: float) -> None:
    assert shift_sigma(0, shift) == 0
    assert shift_sigma(1, shift) == pytest.approx(1)
    low, high = sorted((one, other))
    assert shift_sigma(low, shift) <= shift_sigma(high, shift) + 1e-12
    assert shift_sigma(shift_sigma(one, shift), 1 / shift) == pytest.approx(one, abs=1e-9)
    assert shift_sigma(0.5, 3.0) == 0.75
    assert shift_sigma(one, 1.0) == one


def test_noising_and_velocity_are_those_of_a_straight_line() -> None:
    latents, noise = torch.randn(4, 3, 5, 6), torch.randn(4, 3, 5, 6)
    sigma = torch.tensor([0.0, 0.3, 0.9, 1.0])
    noisy, velocity = add_noise(latents, noise, sigma), velocity_target(latents, noise)
    assert torch.equal(noisy[0], latents[0])
    assert torch.equal(noisy[3], noise[3])
    each = sigma[:, None, None, None]
    assert torch.allclose(noisy - each * velocity, latents, atol=1e-6)
    assert torch.allclose(noisy + (1 - each) * velocity, noise, atol=1e-6)
    (derivative,) = torch.autograd.grad(add_noise(latents, noise, sigma.requires_grad_()).sum(), sigma)
    assert torch.allclose(derivative, velocity.flatten(1).sum(1), atol=1e-4)
    sigma = sigma.detach()
    assert add_noise(latents.bfloat16(), noise.bfloat16(), sigma).dtype == torch.bfloat16


def test_the_loss_is_the_weighted_mean_of_the_samples_means() -> None:
    velocity, target = torch.randn(3, 4, 5, 6), torch.randn(3, 4, 5, 6)
    each = torch.stack([(v - t).square().mean() for v, t in zip(velocity, target, strict=True)])
    weight = torch.tensor([0.5, 2.0, 0.0])
    assert torch.allclose(flow_matching_loss(velocity, target), each.mean())
    assert torch.allclose(flow_matching_loss(velocity, target, weight), (each * weight).mean())
    assert flow_matching_loss(target, target) == 0
    half = flow_matching_loss(velocity.bfloat16(), target.bfloat16())
    assert half.dtype == torch.float32
    assert torch.equal(half, flow_matching_loss(velocity.bfloat16().float(), target.bfloat16().float()))
