"""Attention by plain matrix products, for training on a CPU.

At about 100 tokens the backward pass of the fused kernel takes three times as long.
"""

import torch
from torch import Tensor

fused_attention = torch.nn.functional.scaled_dot_product_attention


def explicit_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(q k^T / sqrt(d) + mask) v for (batch, heads, tokens, d) and an additive mask or none; with any other
    option, the fused kernel as ever.
    """
    boolean = attn_mask is not None and not attn_mask.is_floating_point()
    if boolean or dropout_p or is_causal or scale is not None or enable_gqa:
        return fused_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    batch, heads, tokens, width = query.shape
    query, key, value = (x.reshape(batch * heads, -1, width) for x in (query, key, value))
    scores = torch.bmm(query * width**-0.5, key.mT)
    if attn_mask is not None:
        scores = (scores.view(batch, heads, tokens, -1) + attn_mask.to(scores.dtype)).flatten(0, 1)
    return torch.bmm(scores.softmax(dim=-1), value).view(batch, heads, tokens, width)


def use_explicit_attention() -> None:
    """Puts `explicit_attention` in place of PyTorch's, in this process."""
    torch.nn.functional.scaled_dot_product_attention = explicit_attention
