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
    """softmax(q k^T / sqrt(d)) v for (batch, heads, tokens, d); with any option, the fused kernel as ever."""
    if attn_mask is not None or dropout_p or is_causal or scale is not None or enable_gqa:
        return fused_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    batch, heads, tokens, width = query.shape
    query, key, value = (x.reshape(batch * heads, -1, width) for x in (query, key, value))
    weights = torch.bmm(query * width**-0.5, key.mT).softmax(dim=-1)
    return torch.bmm(weights, value).view(batch, heads, tokens, width)


def use_explicit_attention() -> None:
    """Puts `explicit_attention` in place of PyTorch's, in this process."""
    torch.nn.functional.scaled_dot_product_attention = explicit_attention
