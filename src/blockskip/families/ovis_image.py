"""Ovis-Image: FLUX.1's streams with the text of a small Qwen 3, zeros in the place of padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from blockskip.families.base import Defaults, Text
from blockskip.families.flux_like import FluxLike
from blockskip.families.packing import word_ids
from blockskip.families.prompts import filled_ids

#: What the pipeline says ahead of a prompt.
REQUEST = (
    "Describe the image by detailing the color, quantity, text, shape, size, texture, spatial relationships of the "
    "objects and background: "
)
#: Tokens of the chat format and the request that the transformer is not given.
DROPPED = 28


class OvisImage(FluxLike):
    """OvisImageTransformer2DModel with AutoencoderKL and Qwen 3."""

    name = "ovis_image"
    pipeline_class = "OvisImagePipeline"
    transformer_class = "OvisImageTransformer2DModel"
    defaults = Defaults(
        full_resolution=1024, text_length=256, distribution="uniform", shift=1.0, guidance_scale=1.0,
        num_inference_steps=50, preview_guidance=5.0,
    )  # fmt: skip
    text_parts = (("tokenizer", "text_encoder"),)

    def tokenize(self, tokenizers: Mapping[str, Any], prompts: Sequence[str], length: int) -> dict[str, torch.Tensor]:
        """Ids and mask of the request with the prompt in the tokenizer's chat format, ``length`` after the dropped."""
        tokenizer = tokenizers["tokenizer"]
        messages = [[{"role": "user", "content": REQUEST + prompt}] for prompt in prompts]
        texts = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        return filled_ids(tokenizer, texts, length + DROPPED, add_special_tokens=False)

    def token_counts(self, length: int) -> dict[str, int]:
        """With the tokens that are dropped."""
        return dict.fromkeys(("text_encoder", "mask"), DROPPED + length)

    def text_places(self, ids: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
        """After the tokens that are dropped."""
        return {"text_encoder": (-DROPPED,)}

    def encode_text(self, encoders: Mapping[str, nn.Module], ids: Mapping[str, torch.Tensor]) -> Text:
        """``prompt_embeds`` (B, length, D), zero where there are no words; the transformer reads the zeros too."""
        encoder: Any = encoders["text_encoder"]
        hidden = encoder(ids["text_encoder"], attention_mask=ids["mask"]).last_hidden_state.to(encoder.dtype)
        return {"prompt_embeds": (hidden * ids["mask"][:, :, None])[:, DROPPED:]}

    def forward_inputs(
        self, config: Mapping[str, Any], latents: torch.Tensor, sigma: torch.Tensor, text: Text, guidance: float
    ) -> dict[str, Any]:
        """With ids (0, n, n) of the text."""
        inputs = super().forward_inputs(config, latents, sigma, text, guidance)
        return inputs | {"txt_ids": word_ids(text["prompt_embeds"].shape[1], latents.device)}
