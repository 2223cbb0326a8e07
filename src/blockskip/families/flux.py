"""FLUX.1 (dev, schnell): two streams through double and single blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from blockskip.families.base import Defaults, Text
from blockskip.families.flux_like import FluxLike


class Flux(FluxLike):
    """FluxTransformer2DModel with AutoencoderKL, CLIP (pooled) and T5."""

    name = "flux"
    pipeline_class = "FluxPipeline"
    transformer_class = "FluxTransformer2DModel"
    defaults = Defaults(
        full_resolution=512, text_length=512, distribution="uniform", shift=1.0, guidance_scale=1.0,
        num_inference_steps=28, preview_guidance=3.5,
    )  # fmt: skip
    text_parts = (("tokenizer", "text_encoder"), ("tokenizer_2", "text_encoder_2"))

    def tokenize(self, tokenizers: Mapping[str, Any], prompts: Sequence[str], length: int) -> dict[str, torch.Tensor]:
        """CLIP ids of the tokenizer's own length (77), T5 ids of ``length``; as in the pipeline no mask is used."""
        clip, t5 = tokenizers["tokenizer"], tokenizers["tokenizer_2"]
        shared = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
        return {
            "text_encoder": clip(list(prompts), max_length=clip.model_max_length, **shared).input_ids,
            "text_encoder_2": t5(list(prompts), max_length=length, **shared).input_ids,
        }

    def token_counts(self, length: int) -> dict[str, int]:
        """CLIP's own length, and ``length`` for T5."""
        return {"text_encoder": 77, "text_encoder_2": length}

    def encode_text(self, encoders: Mapping[str, nn.Module], ids: Mapping[str, torch.Tensor]) -> Text:
        """``prompt_embeds`` (B, length, D) of T5 and ``pooled_prompt_embeds`` (B, P) of CLIP."""
        found: Text = {}
        if "text_encoder" in encoders:
            found["pooled_prompt_embeds"] = encoders["text_encoder"](ids["text_encoder"]).pooler_output
        if "text_encoder_2" in encoders:
            found["prompt_embeds"] = encoders["text_encoder_2"](ids["text_encoder_2"])[0]
        return found

    def forward_inputs(
        self, config: Mapping[str, Any], latents: torch.Tensor, sigma: torch.Tensor, text: Text, guidance: float
    ) -> dict[str, Any]:
        """With the pooled vector, and the guidance where the model takes it."""
        return super().forward_inputs(config, latents, sigma, text, guidance) | {
            "pooled_projections": text["pooled_prompt_embeds"],
            "guidance": torch.full_like(sigma, guidance) if config["guidance_embeds"] else None,
        }

    def preview_guidance(
        self, config: Mapping[str, Any], call: Mapping[str, Any], wanted: float | None
    ) -> tuple[float, float]:
        """Distilled models take guidance as an input; the others are drawn with classifier-free guidance, if any."""
        cfg = float(call.get("true_cfg_scale", 1.0))
        if config["guidance_embeds"]:
            embedded = wanted if wanted is not None else call.get("guidance_scale", self.defaults.preview_guidance)
            return float(embedded), cfg
        return 1.0, cfg if wanted is None else wanted
