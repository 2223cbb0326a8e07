"""Chroma: FLUX.1's streams with T5 alone, a mask of the text, and modulation that every block gets from one module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from blockskip.families.base import Defaults, Text
from blockskip.families.flux_like import FluxLike
from blockskip.families.prompts import filled_ids
from blockskip.method.layout import IMAGE, TEXT, BlockLayout


class Chroma(FluxLike):
    """ChromaTransformer2DModel with AutoencoderKL and T5.

    The mask is the pipeline's: a number, not a boolean. Attention adds 1 where both tokens are words (or the first
    padding token) or image, and 0 elsewhere, so that padding is read less and not hidden.
    """

    name = "chroma"
    pipeline_class = "ChromaPipeline"
    transformer_class = "ChromaTransformer2DModel"
    layout = BlockLayout(
        lists=("transformer_blocks", "single_transformer_blocks"),
        returns={"transformer_blocks": (TEXT, IMAGE), "single_transformer_blocks": (IMAGE,)},
        order="txt_img",
    )
    defaults = Defaults(
        full_resolution=1024, text_length=512, distribution="uniform", shift=1.0, guidance_scale=1.0,
        num_inference_steps=35, preview_guidance=5.0,
    )  # fmt: skip
    text_parts = (("tokenizer", "text_encoder"),)

    def tokenize(self, tokenizers: Mapping[str, Any], prompts: Sequence[str], length: int) -> dict[str, torch.Tensor]:
        """T5 ids and mask of ``length``."""
        return filled_ids(tokenizers["tokenizer"], prompts, length)

    def encode_text(self, encoders: Mapping[str, nn.Module], ids: Mapping[str, torch.Tensor]) -> Text:
        """``prompt_embeds`` (B, length, D), and ``prompt_attention_mask`` (B, length): 1 up to the first padding."""
        encoder: Any = encoders["text_encoder"]
        embeds = encoder(ids["text_encoder"], attention_mask=ids["mask"])[0].to(encoder.dtype)
        places = torch.arange(embeds.shape[1], device=embeds.device)
        mask = places <= ids["mask"].sum(dim=1, keepdim=True)
        return {"prompt_embeds": embeds, "prompt_attention_mask": mask.to(embeds.dtype)}

    def forward_inputs(
        self, config: Mapping[str, Any], latents: torch.Tensor, sigma: torch.Tensor, text: Text, guidance: float
    ) -> dict[str, Any]:
        """With the mask of text and image tokens."""
        inputs = super().forward_inputs(config, latents, sigma, text, guidance)
        mask = text["prompt_attention_mask"]
        image = mask.new_ones(mask.shape[0], inputs["img_ids"].shape[0])
        return inputs | {"attention_mask": torch.cat([mask, image], dim=1).to(latents.dtype)}

    def enable_checkpointing(self, model: Any) -> None:
        """With the mask for all blocks: with checkpointing the model gives its single blocks none."""
        super().enable_checkpointing(model)
        masks: list[torch.Tensor | None] = [None]

        def remember(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            masks[0] = kwargs.get("attention_mask")

        def give(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return args, kwargs | {"attention_mask": masks[0]}

        model.register_forward_pre_hook(remember, with_kwargs=True)
        for block in model.single_transformer_blocks:
            block.register_forward_pre_hook(give, with_kwargs=True)
