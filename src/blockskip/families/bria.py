"""Bria 3.2: FLUX.1's streams with T5 alone, each prompt encoded without padding and followed by zeros."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.pipelines.bria.pipeline_bria import get_original_sigmas
from torch import nn

from blockskip.families.base import Defaults, Text
from blockskip.families.flux_like import FluxLike


class Bria(FluxLike):
    """BriaTransformer2DModel with AutoencoderKL and T5; time input 1000 sigma.

    An empty prompt is nothing but zeros, as the pipeline has it in classifier-free guidance.
    """

    name = "bria"
    pipeline_class = "BriaPipeline"
    transformer_class = "BriaTransformer2DModel"
    defaults = Defaults(
        full_resolution=1024, text_length=128, distribution="uniform", shift=1.0, guidance_scale=1.0,
        num_inference_steps=30, preview_guidance=5.0,
    )  # fmt: skip
    text_parts = (("tokenizer", "text_encoder"),)

    def tokenize(self, tokenizers: Mapping[str, Any], prompts: Sequence[str], length: int) -> dict[str, torch.Tensor]:
        """T5 ids and mask as long as the longest prompt; ``kept`` (B, length) is 0 in all of an empty prompt too."""
        tokens = tokenizers["tokenizer"](
            list(prompts), padding="longest", max_length=length, truncation=True, return_tensors="pt"
        )
        mask = tokens.attention_mask
        said = torch.tensor([[int(bool(prompt))] for prompt in prompts])
        return {"text_encoder": tokens.input_ids, "mask": mask, "kept": F.pad(mask * said, (0, length - mask.shape[1]))}

    def token_counts(self, length: int) -> dict[str, int]:
        """Those of a prompt that fills ``length``."""
        return {"text_encoder": length, "mask": length, "kept": length}

    def encode_text(self, encoders: Mapping[str, nn.Module], ids: Mapping[str, torch.Tensor]) -> Text:
        """``prompt_embeds`` (B, length, D), zero where there are no words; the transformer reads the zeros too."""
        encoder: Any = encoders["text_encoder"]
        embeds = encoder(ids["text_encoder"], attention_mask=ids["mask"])[0].to(encoder.dtype)
        kept = ids["kept"]
        filled = F.pad(embeds, (0, 0, 0, kept.shape[1] - embeds.shape[1]))
        return {"prompt_embeds": filled * kept[:, :, None].to(embeds.dtype)}

    def forward_inputs(
        self, config: Mapping[str, Any], latents: torch.Tensor, sigma: torch.Tensor, text: Text, guidance: float
    ) -> dict[str, Any]:
        """With the time as the pipeline has it."""
        return super().forward_inputs(config, latents, sigma, text, guidance) | {"timestep": sigma * 1000}

    def set_timesteps(self, scheduler: Any, steps: int, tokens: int, device: torch.device) -> None:
        """Shifted by the number of image tokens as in FLUX.1, or steps of the whole range from 1 to its end."""
        if scheduler.config.get("use_dynamic_shifting"):
            super().set_timesteps(scheduler, steps, tokens, device)
        else:
            sigmas: Any = get_original_sigmas(scheduler.config.num_train_timesteps, steps)  # type: ignore[no-untyped-call]
            scheduler.set_timesteps(sigmas=sigmas, device=device)
