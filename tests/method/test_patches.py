"""Eq. 1 and where patches lie, for random sizes."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from blockskip.method.patches import DIRECTIONS, Direction, aspect_size, cut_patch, patch_side, place_box

sigmas = st.floats(0, 1)
strides = st.sampled_from([1, 2, 8, 16, 32, 64])


@st.composite
def resolutions(draw: st.DrawFn) -> tuple[int, int, int]:
    """s_min, s_max and a stride of which a multiple lies between them; neither need be a multiple."""
    stride = draw(strides)
    between = draw(st.integers(1, 40)) * stride
    return between - draw(st.integers(0, stride - 1)), between + draw(st.integers(0, 20 * stride)), stride


@given(resolutions(), sigmas, st.sampled_from(DIRECTIONS), st.floats(0, 1, exclude_max=True))
def test_a_side_is_a_multiple_of_the_stride_between_the_resolutions(
    sizes: tuple[int, int, int], sigma: float, direction: Direction, u: float
) -> None:
    s_min, s_max, stride = sizes
    side = patch_side(sigma, s_min, s_max, stride, direction, u)
    assert side % stride == 0
    assert s_min <= side <= s_max
    share = {"low-to-high": sigma, "high-to-low": 1 - sigma, "random": u, "fixed": 1.0}[direction]
    exact = s_min + share * (s_max - s_min)
    nearest = min(range(-(-s_min // stride) * stride, s_max + 1, stride), key=lambda one: abs(one - exact))
    assert abs(side - exact) <= abs(nearest - exact) + 1e-6


@given(resolutions(), sigmas, sigmas)
def test_sides_follow_sigma(sizes: tuple[int, int, int], one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert patch_side(low, *sizes) <= patch_side(high, *sizes)
    assert patch_side(low, *sizes, "high-to-low") >= patch_side(high, *sizes, "high-to-low")
    for direction in ("random", "fixed"):
        assert patch_side(low, *sizes, direction, 0.3) == patch_side(high, *sizes, direction, 0.3)
    assert patch_side(0.5, *sizes, "random", low) <= patch_side(0.5, *sizes, "random", high)


def test_the_ends_are_the_resolutions() -> None:
    assert [patch_side(sigma, 256, 512, 16) for sigma in (0.0, 0.25, 0.5, 1.0)] == [256, 320, 384, 512]
    assert [patch_side(sigma, 256, 512, 16, "high-to-low") for sigma in (0.0, 0.25, 1.0)] == [512, 448, 256]
    assert patch_side(0.0, 256, 512, 16, "fixed") == 512
    assert patch_side(1.0, 100, 200, 16) == 192
    assert patch_side(0.0, 100, 200, 16) == 112
    assert {patch_side(1.0, 256, 512, 16, "random", u / 100) for u in range(100)} == set(range(256, 513, 16))


@pytest.mark.parametrize(
    "arguments", [(-0.1, 64, 128, 8), (1.1, 64, 128, 8), (0.5, 128, 64, 8), (0.5, 65, 71, 8), (0.5, 0, 7, 8)]
)
def test_what_has_no_side_is_refused(arguments: tuple[float, int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"sigma lies|no patch side"):
        patch_side(*arguments)


@given(st.data(), st.integers(1, 500), st.integers(1, 500))
def test_a_box_lies_inside(data: st.DataObject, width: int, height: int) -> None:
    patch = data.draw(st.integers(1, width)), data.draw(st.integers(1, height))
    u = data.draw(st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2))
    left, top, across, down = place_box((width, height), patch, u)
    assert (across, down) == patch
    assert 0 <= left <= width - across
    assert 0 <= top <= height - down
    assert place_box((width, height), patch, (math.nextafter(1, 0),) * 2)[:2] == (width - across, height - down)
    assert place_box((width, height), patch, (0.0, 0.0))[:2] == (0, 0)


def test_every_place_is_equally_likely() -> None:
    lefts = [place_box((14, 10), (10, 10), ((index + 0.5) / 1000, 0.5))[0] for index in range(1000)]
    assert [lefts.count(left) for left in range(5)] == [200] * 5


def test_a_patch_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="10x11 does not fit in a picture of 10x10"):
        place_box((10, 10), (10, 11), (0.0, 0.0))


@given(st.integers(8, 2000), st.floats(0.2, 5), strides)
def test_a_size_of_an_aspect_is_made_of_strides(side: int, aspect: float, stride: int) -> None:
    width, height = aspect_size(side, aspect, stride)
    assert width % stride == height % stride == 0
    assert min(width, height) >= stride
    if side * min(aspect, 1 / aspect) ** 0.5 > 16 * stride:  # long enough that rounding to the stride is small
        assert width * height == pytest.approx(side**2, rel=0.07)
        assert width / height == pytest.approx(aspect, rel=0.07)


@given(st.integers(1, 40), st.integers(1, 40), st.data())
def test_a_patch_of_the_training_size_is_the_picture_s_own_pixels(width: int, height: int, data: st.DataObject) -> None:
    picture = torch.rand(3, 40, 50) * 2 - 1
    left, top = data.draw(st.integers(0, 50 - width)), data.draw(st.integers(0, 40 - height))
    patch = cut_patch(picture, (left, top, width, height), (width, height))
    assert torch.equal(patch, picture[:, top : top + height, left : left + width])
    patch.zero_()
    assert picture.abs().min() > 0


@pytest.mark.parametrize("size", [(32, 32), (24, 8), (7, 31)])
def test_a_fine_checkerboard_becomes_grey(size: tuple[int, int]) -> None:
    rows, columns = torch.meshgrid(torch.arange(96), torch.arange(96), indexing="ij")
    board = (((rows + columns) % 2) * 2.0 - 1).expand(3, 96, 96)
    patch = cut_patch(board, (0, 0, 96, 96), size)
    assert patch.shape == (3, size[1], size[0])
    assert patch[:, 1:-1, 1:-1].abs().max() < 0.06
    aliased = F.interpolate(board[None], size=(32, 32), mode="bicubic")
    assert aliased.abs().min() > 0.9  # without antialiasing it is as black and white as before


def test_a_resized_patch_is_not_turned_and_stays_in_range() -> None:
    ramp = torch.linspace(-1, 1, 80).expand(3, 60, 80)
    patch = cut_patch(ramp, (10, 5, 40, 50), (20, 25))
    assert patch.shape == (3, 25, 20)
    assert torch.allclose(patch, patch[:, :1].expand_as(patch), atol=1e-5)
    assert patch[0, 0].diff().min() > 0
    assert patch.mean() == pytest.approx(float(ramp[:, 5:55, 10:50].mean()), abs=1e-3)
    edge = torch.where(torch.arange(64) < 32, -1.0, 1.0).expand(3, 64, 64)
    for size in ((96, 96), (40, 40)):
        assert cut_patch(edge, (0, 0, 64, 64), size).abs().max() <= 1
    assert torch.allclose(cut_patch(torch.full((3, 9, 9), 0.3), (0, 0, 9, 9), (4, 5)), torch.tensor(0.3), atol=1e-5)


@pytest.mark.parametrize("box", [(-1, 0, 4, 4), (0, -1, 4, 4), (7, 0, 4, 4), (0, 5, 4, 4)])
def test_a_box_that_leaves_the_picture_is_refused(box: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="leaves a picture of 10x8"):
        cut_patch(torch.zeros(3, 8, 10), box, (4, 4))
