"""Features as int8: one byte a value, and one float32 scale for each token's vector.

    q = round(x / s), s = max |x| / 127 over the token's D values      x' = q * s, |x' - x| <= s / 2

A vector of zeros stays zero. One outlier makes its own token coarse and no other one. A vector with a value that is not
finite becomes all NaN, so that a loss made from it is seen not to be finite, as without quantisation.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from blockskip.method.skipping import Features

#: Between a tensor's name and the dtype it had, in the name of its scales.
_SCALE = " scale "


def quantize_tokens(features: Mapping[str, torch.Tensor]) -> Features:
    """Features with every floating tensor (B, tokens, D) as int8 beside its scales (B, tokens, 1) float32.

    The scales of ``name`` are called ``name scale bfloat16``, with the dtype that ``dequantize_tokens`` gives back. All
    other tensors (what a rule of one's own may store) stay as they are.
    """
    packed: Features = {}
    for name, value in features.items():
        if value.ndim != 3 or not value.is_floating_point():
            packed[name] = value
            continue
        largest = value.abs().amax(dim=2, keepdim=True).float()
        scale = largest / 127
        # A token of zeros is divided by one. What is not finite makes the scale so, and its integers do not matter.
        steps = value.float() / torch.where(largest > 0, scale, torch.ones_like(scale))
        packed[name] = steps.round_().nan_to_num_(0.0, 0.0, 0.0).clamp_(-127, 127).to(torch.int8)
        unknown = torch.full_like(scale, float("nan"))
        dtype = str(value.dtype).removeprefix("torch.")
        packed[f"{name}{_SCALE}{dtype}"] = torch.where(torch.isfinite(scale), scale, unknown)
    return packed


def dequantize_tokens(features: Mapping[str, torch.Tensor]) -> Features:
    """Features as they were before ``quantize_tokens``, in their own dtypes; those that never were int8 are the same.

    Kernel: the planner runs it on fake tensors.
    """
    scales = {name.partition(_SCALE)[0]: name for name in features if _SCALE in name}
    found: Features = {}
    for name, value in features.items():
        if name in scales:
            dtype = getattr(torch, scales[name].partition(_SCALE)[2])
            found[name] = (value.float() * features[scales[name]]).to(dtype)
        elif _SCALE not in name:
            found[name] = value
    return found


def relative_error(features: Mapping[str, torch.Tensor], packed: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """|x' - x| / |x| of every tensor that is int8 in ``packed``, by its name."""
    restored = dequantize_tokens(packed)
    return {
        name: float((restored[name].float() - value.float()).norm() / value.float().norm().clamp_min(1e-30))
        for name, value in features.items()
        if packed[name].dtype == torch.int8 and value.is_floating_point()
    }
