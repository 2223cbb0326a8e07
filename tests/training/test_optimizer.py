"""The learning rate as a function of the step, and an optimiser that is put away and taken up again."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from blockskip.config import TrainConfig
from blockskip.training.optimizer import learning_rate, load_optimizer_state, make_optimizer, optimizer_state

SHAPES = ["constant", "cosine", "linear"]


def rates(**options: object) -> list[float]:
    config = TrainConfig(**({"learning_rate": 1.0} | options))  # type: ignore[arg-type]
    return [learning_rate(config, step) for step in range(config.steps)]


def test_the_curves_are_those_of_their_names() -> None:
    assert rates(steps=4) == [1, 1, 1, 1]
    assert rates(steps=4, lr_scheduler="linear") == [1, 0.75, 0.5, 0.25]
    assert rates(steps=4, lr_scheduler="cosine") == pytest.approx([1, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2])
    assert rates(steps=6, lr_warmup_steps=4) == [0.25, 0.5, 0.75, 1, 1, 1]
    assert rates(steps=6, lr_warmup_steps=2, lr_scheduler="linear") == [0.5, 1, 1, 0.75, 0.5, 0.25]
    assert rates(steps=2, lr_warmup_steps=4, lr_scheduler="cosine") == [0.25, 0.5]


@given(st.sampled_from(SHAPES), st.integers(1, 100), st.integers(0, 120), st.floats(1e-7, 1.0))
def test_every_step_has_a_rate_above_zero_that_rises_then_falls(
    shape: str, steps: int, warmup: int, peak: float
) -> None:
    curve = rates(steps=steps, lr_warmup_steps=warmup, lr_scheduler=shape, learning_rate=peak)
    assert min(curve) > 0
    assert max(curve) <= peak * (1 + 1e-12)
    rising, falling = curve[:warmup], curve[warmup:]
    assert all(a < b for a, b in itertools.pairwise(rising))
    assert all(a >= b for a, b in itertools.pairwise(falling))
    assert not falling or falling[0] == peak


def test_a_longer_run_follows_the_curve_of_its_new_length() -> None:
    short, long = (TrainConfig(steps=steps, lr_scheduler="cosine") for steps in (10, 20))
    assert learning_rate(long, 10) == pytest.approx(long.learning_rate / 2)
    assert learning_rate(short, 5) == pytest.approx(short.learning_rate / 2)


def _train(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for value in parameters:
            value.grad = torch.randn(value.shape, generator=generator)
        optimizer.step()


def test_an_optimiser_taken_up_again_goes_on_as_if_never_put_away() -> None:
    config = TrainConfig(learning_rate=0.1)
    straight = [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(2))]
    optimizer = make_optimizer(straight, config)
    _train(straight, optimizer, range(3))
    kept = [value.detach().clone() for value in straight]
    state = {name: value.clone() for name, value in optimizer_state(optimizer).items()}
    assert set(state) == {f"{i}.{name}" for i in (0, 1) for name in ("step", "exp_avg", "exp_avg_sq")}
    _train(straight, optimizer, range(3, 6))

    again = [nn.Parameter(value) for value in kept]
    later = make_optimizer(again, TrainConfig(learning_rate=0.3))
    load_optimizer_state(later, state)
    assert later.param_groups[0]["lr"] == 0.3  # the settings are those of the config, not those that were put away
    later.param_groups[0]["lr"] = 0.1
    _train(again, later, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(again, straight, strict=True))
    found = optimizer_state(later)
    assert all(torch.equal(value, found[name]) for name, value in optimizer_state(optimizer).items())


def test_a_fresh_optimiser_has_no_state() -> None:
    optimizer = make_optimizer([nn.Parameter(torch.ones(2))], TrainConfig())
    assert optimizer_state(optimizer) == {}
    load_optimizer_state(optimizer, {})
    assert optimizer_state(optimizer) == {}
