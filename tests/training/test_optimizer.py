"""The learning rate as a function of the step, and an optimiser that is put away and taken up again."""

import itertools
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from blockskip.config import TrainConfig
from blockskip.errors import UserError
from blockskip.training.checkpoints import Checkpoint, latest_checkpoint, save_checkpoint
from blockskip.training.optimizer import (
    check_optimizer,
    learning_rate,
    load_optimizer_state,
    make_optimizer,
    optimizer_state,
    parameter_state,
)

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


#: Names of a parameter's state: of a small one, and of one whose moments bitsandbytes keeps in 8 bits.
STATES = {
    "adamw": (("step", "exp_avg", "exp_avg_sq"),) * 2,
    "adamw8bit": (("step", "state1", "state2"), ("step", "state1", "state2", "absmax1", "absmax2")),
}


@pytest.mark.parametrize("kind", STATES)
def test_an_optimiser_taken_up_again_goes_on_as_if_never_put_away(kind: str, tmp_path: Path) -> None:
    config = TrainConfig(learning_rate=0.1, optimizer=kind)  # type: ignore[arg-type]
    straight = [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(80, 60))]
    optimizer = make_optimizer(straight, config)
    _train(straight, optimizer, range(3))
    kept = [value.detach().clone() for value in straight]
    save_checkpoint(tmp_path, Checkpoint(3, {}, optimizer_state(optimizer), {}), 0)
    found = latest_checkpoint(tmp_path)
    assert found is not None
    state = found.optimizer
    assert set(state) == {f"{i}.{name}" for i in (0, 1) for name in STATES[kind][i]}
    _train(straight, optimizer, range(3, 6))

    again = [nn.Parameter(value) for value in kept]
    later = make_optimizer(again, TrainConfig(learning_rate=0.3, optimizer=kind))  # type: ignore[arg-type]
    load_optimizer_state(later, state)
    assert later.param_groups[0]["lr"] == 0.3  # the settings are those of the config, not those that were put away
    later.param_groups[0]["lr"] = 0.1
    _train(again, later, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(again, straight, strict=True))
    ended = optimizer_state(later)
    assert all(torch.equal(value, ended[name]) for name, value in optimizer_state(optimizer).items())


def test_moments_in_8_bits_take_two_bytes_a_parameter_and_lead_to_nearly_the_same() -> None:
    ends, sizes = {}, {}
    for kind in STATES:
        config = TrainConfig(learning_rate=0.1, optimizer=kind)  # type: ignore[arg-type]
        (parameter,) = parameters = [nn.Parameter(torch.ones(80, 64))]
        optimizer = make_optimizer(parameters, config)
        _train(parameters, optimizer, range(20))
        ends[kind] = parameter.detach()
        sizes[kind] = sum(value.nbytes for value in parameter_state(optimizer, parameter).values())
    assert sizes == {"adamw": 2 * 4 * 80 * 64 + 4, "adamw8bit": 2 * (80 * 64 + 4 * 80 * 64 // 256) + 8}
    moved, error = (ends["adamw"] - 1).norm(), (ends["adamw8bit"] - ends["adamw"]).norm()
    assert 0 < error < 0.1 * moved


def test_an_optimiser_that_cannot_run_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for device in ("cpu", "cuda"):
        check_optimizer("adamw8bit", torch.device(device))
    check_optimizer("adamw", torch.device("mps"))
    with pytest.raises(UserError, match=r'train\.optimizer = "adamw8bit".*mps.*"adamw"'):
        check_optimizer("adamw8bit", torch.device("mps"))
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(UserError, match=r'train\.optimizer = "adamw8bit" needs bitsandbytes: pip install'):
        check_optimizer("adamw8bit", torch.device("cpu"))


def test_a_fresh_optimiser_has_no_state() -> None:
    optimizer = make_optimizer([nn.Parameter(torch.ones(2))], TrainConfig())
    assert optimizer_state(optimizer) == {}
    load_optimizer_state(optimizer, {})
    assert optimizer_state(optimizer) == {}
