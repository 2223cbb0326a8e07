"""Random numbers depend on seed and purpose alone."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from blockskip.seeds import derive_seed, gaussian, generator


@given(st.integers(0, 2**62), st.lists(st.text(min_size=1) | st.integers(0, 10**6), min_size=1, max_size=4))
def test_a_derived_seed_fits_and_is_pure(seed: int, purpose: list[str | int]) -> None:
    found = derive_seed(seed, *purpose)
    assert 0 <= found < 2**63
    assert derive_seed(seed, *purpose) == found
    torch.Generator().manual_seed(found)


def test_purposes_do_not_share_a_seed() -> None:
    purposes = [(seed, what, step) for seed in range(3) for what in ("noise", "dropout", "order") for step in range(50)]
    assert len({derive_seed(*purpose) for purpose in purposes}) == len(purposes)
    assert derive_seed(1, 2, 3) != derive_seed(1, 23)


def test_the_value_is_the_same_on_every_machine() -> None:
    """SHA-256 of "0/adapter", first 8 bytes, without the sign."""
    assert derive_seed(0, "adapter") == 0x30CA97AAD2658052


def test_draws_do_not_disturb_each_other() -> None:
    before = torch.get_rng_state()
    first, second = generator(0, "a"), generator(0, "b")
    expected = torch.rand(3, generator=generator(0, "b"))
    torch.rand(100, generator=first)
    gaussian((4, 4), 1)
    assert torch.equal(torch.rand(3, generator=second), expected)
    assert torch.equal(torch.get_rng_state(), before)


def test_gaussian() -> None:
    noise = gaussian((3, 100, 100), 5)
    assert noise.dtype == torch.float32
    assert noise.shape == (3, 100, 100)
    assert abs(float(noise.mean())) < 0.03
    assert abs(float(noise.std()) - 1) < 0.03
    assert torch.equal(noise, gaussian((3, 100, 100), 5))
    assert not torch.equal(noise, gaussian((3, 100, 100), 6))
