"""Prompts as token ids, for the families whose tokenizer fills them to one length and says which are words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def filled_ids(tokenizer: Any, prompts: Sequence[str], length: int, **options: Any) -> dict[str, torch.Tensor]:
    """``text_encoder``: ids (B, length) int64, and ``mask``: (B, length) int64, 1 for words, 0 for what fills up.

    Args:
        options: further ones of the tokenizer's call.
    """
    tokens = tokenizer(
        list(prompts), padding="max_length", max_length=length, truncation=True, return_tensors="pt", **options
    )
    return {"text_encoder": tokens.input_ids, "mask": tokens.attention_mask}
