"""Sizes in pixels: of a scaled picture, of what is trained, and of the patch between them."""

from __future__ import annotations

import math

from blockskip.method.patches import aspect_size

#: Pictures longer than this are trained in patches of this aspect, so that a sample's area stays what it should be.
LARGEST_ASPECT = 4.0


def scaled_size(size: tuple[int, int], resolution: int, full_resolution: int) -> tuple[int, int]:
    """(width, height) in pixels that a picture is scaled to before patches are cut.

    The short side becomes min(full_resolution, itself), but never less than ``resolution``; the aspect is kept.
    """
    short = min(size)
    target = max(resolution, min(full_resolution, short))
    width, height = ((2 * side * target + short) // (2 * short) for side in size)
    return width, height


def training_size(scaled: tuple[int, int], resolution: int, stride: int) -> tuple[int, int]:
    """(width, height) in pixels that patches of a picture's aspect are trained at: the area of ``resolution`` squared.

    Aspects beyond ``LARGEST_ASPECT`` count as that.
    """
    aspect = min(max(scaled[0] / scaled[1], 1 / LARGEST_ASPECT), LARGEST_ASPECT)
    return aspect_size(resolution, aspect, stride)


def patch_size(
    side: int, training: tuple[int, int], scaled: tuple[int, int], resolution: int, stride: int
) -> tuple[int, int]:
    """(width, height) of a patch: the aspect of the training size, about the area of ``side`` squared.

    Both are multiples of the stride, and inside the scaled picture (which alone can make them no multiple). The patch
    of a picture that is too narrow for it is made smaller, so that its aspect stays.
    """
    fitting = min(side, *(resolution * room / length for length, room in zip(training, scaled, strict=True)))

    def fit(length: int, room: int) -> int:
        wanted = max(stride, math.floor(length * fitting / resolution / stride + 0.5) * stride)
        return min(wanted, room // stride * stride or room)

    return fit(training[0], scaled[0]), fit(training[1], scaled[1])
