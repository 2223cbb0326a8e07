"""SANA (0.6B, 1.6B, 1.5): linear self-attention, cross-attention to the text in every block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from blockskip.families.base import Defaults, Family, Text
from blockskip.families.prompts import filled_ids
from blockskip.method.layout import IMAGE, BlockLayout


class Sana(Family):
    """SanaTransformer2DModel with AutoencoderDC and Gemma-2; time input 1000 sigma, output noise - x.

    Prompts are encoded as they stand, without the pipeline's long instruction to the language model, as in the family's
    diffusers script.
    """

    name = "sana"
    pipeline_class = "SanaPipeline"
    transformer_class = "SanaTransformer2DModel"
    layout = BlockLayout(lists=("transformer_blocks",), returns=(IMAGE,), cross="attn2")
    defaults = Defaults(
        full_resolution=1024, text_length=300, distribution="uniform", shift=1.0, guidance_scale=1.0,
        num_inference_steps=20, preview_guidance=4.5,
    )  # fmt: skip
    text_parts = (("tokenizer", "text_encoder"),)
    lora_targets = ("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn2.to_q", "attn2.to_k", "attn2.to_v")
    text_in_blocks = True

    def vae_factor(self, vae_config: Mapping[str, Any]) -> int:
        """Halved once between each two levels of the autoencoder (32 for the published one)."""
        return int(2 ** (len(vae_config["encoder_block_out_channels"]) - 1))

    def token_patch(self, transformer_config: Mapping[str, Any]) -> int:
        """1 in the published models."""
        return int(transformer_config["patch_size"])

    def latent_channels(self, vae_config: Mapping[str, Any]) -> int:
        """32 in the published models."""
        return int(vae_config["latent_channels"])

    def tokenize(self, tokenizers: Mapping[str, Any], prompts: Sequence[str], length: int) -> dict[str, torch.Tensor]:
        """Gemma ids and mask, stripped and lower-cased as the pipeline does, padded on the right."""
        tokenizer = tokenizers["tokenizer"]
        tokenizer.padding_side = "right"
        return filled_ids(tokenizer, [prompt.lower().strip() for prompt in prompts], length)

    def encode_text(self, encoders: Mapping[str, nn.Module], ids: Mapping[str, torch.Tensor]) -> Text:
        """``prompt_embeds`` (B, length, D) and ``prompt_attention_mask`` (B, length) int64."""
        embeds = encoders["text_encoder"](ids["text_encoder"], attention_mask=ids["mask"])[0]
        return {"prompt_embeds": embeds, "prompt_attention_mask": ids["mask"]}

    def encode_pixels(self, vae: Any, pixels: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """The deterministic latent, scaled."""
        latents: torch.Tensor = vae.encode(pixels).latent * vae.config.scaling_factor
        return latents

    def decode(self, vae: Any, latents: torch.Tensor) -> torch.Tensor:
        """The decoder after undoing the scale."""
        pixels: torch.Tensor = vae.decode(latents / vae.config.scaling_factor, return_dict=False)[0]
        return pixels

    def forward_inputs(
        self, config: Mapping[str, Any], latents: torch.Tensor, sigma: torch.Tensor, text: Text, guidance: float
    ) -> dict[str, Any]:
        """Latents as they are; the time runs from 0 to 1000, times the model's own scale."""
        return {
            "hidden_states": latents,
            "encoder_hidden_states": text["prompt_embeds"],
            "encoder_attention_mask": text["prompt_attention_mask"],
            "timestep": sigma * 1000 * config.get("timestep_scale", 1.0),
            "guidance": torch.full_like(sigma, guidance) if config.get("guidance_embeds") else None,
            "return_dict": False,
        }

    def velocity(self, output: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        """The output as it is (learned-variance channels, if any, dropped)."""
        return output[:, : latents.shape[1]]

    def set_timesteps(self, scheduler: Any, steps: int, tokens: int, device: torch.device) -> None:
        """The scheduler's own times."""
        scheduler.set_timesteps(steps, device=device)
