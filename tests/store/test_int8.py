"""Features as int8: how far values move, what stays as it was, and what happens to odd vectors."""

import pytest
import torch

from blockskip.store.int8 import dequantize_tokens, quantize_tokens, relative_error

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def restored(value: torch.Tensor) -> torch.Tensor:
    return dequantize_tokens(quantize_tokens({"front.x": value}))["front.x"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_value_moves_by_at_most_half_a_step_of_its_own_token(dtype: torch.dtype) -> None:
    value = (torch.randn(2, 7, 64) * torch.logspace(-3, 3, 7)[None, :, None]).to(dtype)
    before = value.clone()
    packed = quantize_tokens({"front.x": value})
    assert torch.equal(value, before)
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in packed.items()} == {
        "front.x": (torch.int8, (2, 7, 64)),
        f"front.x scale {str(dtype)[6:]}": (torch.float32, (2, 7, 1)),
    }
    found = dequantize_tokens(packed)
    assert found.keys() == {"front.x"}
    assert found["front.x"].dtype == dtype
    half_step = value.float().abs().amax(dim=2, keepdim=True) / 254
    rounding = value.float().abs() * torch.finfo(dtype).eps
    assert bool(((found["front.x"].float() - value.float()).abs() <= 1.0001 * half_step + rounding).all())
    largest = value.abs() == value.abs().amax(dim=2, keepdim=True)
    torch.testing.assert_close(found["front.x"][largest], value[largest], rtol=1e-6, atol=0)
    error = relative_error({"front.x": value}, packed)
    assert error.keys() == {"front.x"}
    assert 1e-3 < error["front.x"] < 2e-2


def test_a_huge_outlier_spoils_its_own_token_alone() -> None:
    value = torch.randn(1, 3, 32)
    alone = restored(value)
    value[0, 1, 5] = 1e30
    found = restored(value)
    assert torch.equal(found[0, [0, 2]], alone[0, [0, 2]])
    assert float(found[0, 1, 5]) == pytest.approx(1e30)
    assert not found[0, 1, 6:].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_stay_zeros_and_the_largest_numbers_stay_finite(dtype: torch.dtype) -> None:
    value = torch.zeros(1, 3, 8, dtype=dtype)
    value[0, 1] = torch.finfo(dtype).max / 2
    value[0, 2] = -torch.finfo(dtype).max / 2
    found = restored(value)
    assert not found[0, 0].any()
    torch.testing.assert_close(found, value, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_vector_that_is_not_finite_is_seen_as_such(bad: float) -> None:
    value = torch.randn(1, 3, 8)
    alone = restored(value)
    value[0, 1, 4] = bad
    found = restored(value)
    assert torch.equal(found[0, [0, 2]], alone[0, [0, 2]])
    assert bool(found[0, 1].isnan().all())


def test_what_is_no_vector_of_a_token_stays_as_it_is() -> None:
    features = {
        "tail.residual": torch.randn(1, 4, 8),
        "tail.mean": torch.randn(1, 8),
        "tail.count": torch.arange(12).reshape(1, 4, 3),
    }
    packed = quantize_tokens(features)
    found = dequantize_tokens(packed)
    assert found.keys() == features.keys()
    for name in ("tail.mean", "tail.count"):
        assert packed[name] is features[name]
        assert found[name] is features[name]
    assert relative_error(features, packed).keys() == {"tail.residual"}


def test_features_that_were_never_int8_are_not_touched() -> None:
    features = {"front.x": torch.randn(1, 4, 8), "front.y": torch.ones(1, 4, 8, dtype=torch.bfloat16)}
    found = dequantize_tokens(features)
    assert all(found[name] is value for name, value in features.items())
