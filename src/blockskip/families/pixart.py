"""PixArt-Sigma and PixArt-Alpha: cross-attention to the text in every block; they predict the noise of a DDPM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from blockskip.families.base import Defaults, Text
from blockskip.families.kl import KLFamily
from blockskip.families.prompts import filled_ids
from blockskip.method.layout import IMAGE, BlockLayout

#: Times of the process with which the models were trained, and its first and last beta.
TIMES, BETAS = 1000, (1e-4, 0.02)
#: Pixels per latent pixel of the published autoencoders, by which the model is told a picture's size.
VAE_FACTOR = 8


class PixArtSigma(KLFamily):
    """PixArtTransformer2DModel with AutoencoderKL and T5; time input 0 to 999, the nearest to 1000 sigma; output noise.

    x_t = sqrt(a_t) x + sqrt(1 - a_t) noise, where a_t is the product of 1 - beta of all times up to t. Sigma is the
    time t / T here, and not the share of noise.
    """

    name = "pixart_sigma"
    pipeline_class = "PixArtSigmaPipeline"
    transformer_class = "PixArtTransformer2DModel"
    layout = BlockLayout(lists=("transformer_blocks",), returns=(IMAGE,), cross="attn2")
    defaults = Defaults(
        full_resolution=1024, text_length=300, distribution="uniform", shift=1.0, guidance_scale=1.0,
        num_inference_steps=20, preview_guidance=4.5,
    )  # fmt: skip
    text_parts = (("tokenizer", "text_encoder"),)
    lora_targets = (
        "attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0",
        "attn2.to_q", "attn2.to_k", "attn2.to_v", "attn2.to_out.0",
    )  # fmt: skip
    text_in_blocks = True

    def token_patch(self, transformer_config: Mapping[str, Any]) -> int:
        """2 in the published models."""
        return int(transformer_config["patch_size"])

    def tokenize(self, tokenizers: Mapping[str, Any], prompts: Sequence[str], length: int) -> dict[str, torch.Tensor]:
        """T5 ids and mask, stripped and lower-cased as the pipeline does."""
        return filled_ids(tokenizers["tokenizer"], [prompt.lower().strip() for prompt in prompts], length)

    def encode_text(self, encoders: Mapping[str, nn.Module], ids: Mapping[str, torch.Tensor]) -> Text:
        """``prompt_embeds`` (B, length, D) and ``prompt_attention_mask`` (B, length) int64."""
        embeds = encoders["text_encoder"](ids["text_encoder"], attention_mask=ids["mask"])[0]
        return {"prompt_embeds": embeds, "prompt_attention_mask": ids["mask"]}

    def add_noise(self, latents: torch.Tensor, noise: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        """sqrt(a_t) x + sqrt(1 - a_t) noise."""
        betas = torch.linspace(*BETAS, TIMES, dtype=torch.float32, device=latents.device)
        kept = torch.cumprod(1.0 - betas, dim=0)[_times(sigma).long()].to(latents.dtype)
        kept = kept.reshape(-1, *[1] * (latents.ndim - 1))
        return kept.sqrt() * latents + (1 - kept).sqrt() * noise

    def target(self, latents: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """The noise."""
        return noise

    def forward_inputs(
        self, config: Mapping[str, Any], latents: torch.Tensor, sigma: torch.Tensor, text: Text, guidance: float
    ) -> dict[str, Any]:
        """Latents as they are; models of 1024 px that were trained with it are told the patch's size and aspect."""
        size: dict[str, torch.Tensor | None] = {"resolution": None, "aspect_ratio": None}
        told = config.get("use_additional_conditions")
        if config["sample_size"] == 128 if told is None else told:
            batch, _, rows, columns = latents.shape
            pixels = [float(rows * VAE_FACTOR), float(columns * VAE_FACTOR)]
            size["resolution"] = text["prompt_embeds"].new_tensor([pixels]).repeat(batch, 1)
            size["aspect_ratio"] = text["prompt_embeds"].new_tensor([[rows / columns]]).repeat(batch, 1)
        return {
            "hidden_states": latents,
            "encoder_hidden_states": text["prompt_embeds"],
            "encoder_attention_mask": text["prompt_attention_mask"],
            "timestep": _times(sigma),
            "added_cond_kwargs": size,
            "return_dict": False,
        }

    def velocity(self, output: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        """The predicted noise; the channels of the learned variance are dropped."""
        return output[:, : latents.shape[1]]

    def set_timesteps(self, scheduler: Any, steps: int, tokens: int, device: torch.device) -> None:
        """The scheduler's own times."""
        scheduler.set_timesteps(steps, device=device)


class PixArtAlpha(PixArtSigma):
    """The same architecture with shorter texts; 1024 px models are told the patch's size."""

    name = "pixart_alpha"
    pipeline_class = "PixArtAlphaPipeline"
    defaults = Defaults(
        full_resolution=1024, text_length=120, distribution="uniform", shift=1.0, guidance_scale=1.0,
        num_inference_steps=20, preview_guidance=4.5,
    )  # fmt: skip


def _times(sigma: torch.Tensor) -> torch.Tensor:
    """The whole times t (B,), float32, in 0 to 999."""
    return (sigma * TIMES).round().clamp(0, TIMES - 1)
