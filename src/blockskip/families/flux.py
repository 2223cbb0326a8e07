"""FLUX.1 (dev, schnell): two streams through double and single blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from torch import nn

from blockskip.families.base import Defaults, Family, Text
from blockskip.method.layout import IMAGE, TEXT, BlockLayout


class Flux(Family):
    """FluxTransformer2DModel with AutoencoderKL, CLIP (pooled) and T5; time input sigma, output noise - x."""

    name = "flux"
    pipeline_class = "FluxPipeline"
    transformer_class = "FluxTransformer2DModel"
    layout = BlockLayout(
        lists=("transformer_blocks", "single_transformer_blocks"), returns=(TEXT, IMAGE), order="txt_img"
    )
    defaults = Defaults(
        full_resolution=512, text_length=512, distribution="uniform", shift=1.0, guidance_scale=1.0,
        num_inference_steps=28, preview_guidance=3.5,
    )  # fmt: skip
    text_parts = (("tokenizer", "text_encoder"), ("tokenizer_2", "text_encoder_2"))
    lora_targets = (
        "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
        "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
        "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2",
    )  # fmt: skip
    text_in_blocks = False

    def vae_factor(self, vae_config: Mapping[str, Any]) -> int:
        """Halved once between each two levels of the autoencoder."""
        return int(2 ** (len(vae_config["block_out_channels"]) - 1))

    def token_patch(self, transformer_config: Mapping[str, Any]) -> int:
        """The pipeline packs 2x2 latent pixels into a token."""
        return 2

    def latent_channels(self, vae_config: Mapping[str, Any]) -> int:
        """Channels before packing."""
        return int(vae_config["latent_channels"])

    def tokenize(self, tokenizers: Mapping[str, Any], prompts: Sequence[str], length: int) -> dict[str, torch.Tensor]:
        """CLIP ids of the tokenizer's own length (77), T5 ids of ``length``; as in the pipeline no mask is used."""
        clip, t5 = tokenizers["tokenizer"], tokenizers["tokenizer_2"]
        shared = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
        return {
            "text_encoder": clip(list(prompts), max_length=clip.model_max_length, **shared).input_ids,
            "text_encoder_2": t5(list(prompts), max_length=length, **shared).input_ids,
        }

    def encode_text(self, encoders: Mapping[str, nn.Module], ids: Mapping[str, torch.Tensor]) -> Text:
        """``prompt_embeds`` (B, length, D) of T5 and ``pooled_prompt_embeds`` (B, P) of CLIP."""
        found: Text = {}
        if "text_encoder" in encoders:
            found["pooled_prompt_embeds"] = encoders["text_encoder"](ids["text_encoder"]).pooler_output
        if "text_encoder_2" in encoders:
            found["prompt_embeds"] = encoders["text_encoder_2"](ids["text_encoder_2"])[0]
        return found

    def encode_pixels(self, vae: Any, pixels: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """(mean + std * noise - shift) * scale."""
        posterior = vae.encode(pixels).latent_dist
        latents = posterior.mean + posterior.std * noise.to(posterior.mean.dtype)
        scaled: torch.Tensor = (latents - vae.config.shift_factor) * vae.config.scaling_factor
        return scaled

    def decode(self, vae: Any, latents: torch.Tensor) -> torch.Tensor:
        """The decoder after undoing scale and shift."""
        scaled = latents / vae.config.scaling_factor + vae.config.shift_factor
        pixels: torch.Tensor = vae.decode(scaled, return_dict=False)[0]
        return pixels

    def forward_inputs(
        self, config: Mapping[str, Any], latents: torch.Tensor, sigma: torch.Tensor, text: Text, guidance: float
    ) -> dict[str, Any]:
        """Packed latents (B, h/2 * w/2, 4C), ids from 0 on the patch's own grid."""
        batch, channels, height, width = latents.shape
        rows, columns = height // 2, width // 2
        packed = latents.reshape(batch, channels, rows, 2, columns, 2).permute(0, 2, 4, 1, 3, 5)
        ids = torch.zeros(rows, columns, 3, device=latents.device)
        ids[..., 1] += torch.arange(rows, device=latents.device)[:, None]
        ids[..., 2] += torch.arange(columns, device=latents.device)[None, :]
        prompt = text["prompt_embeds"]
        return {
            "hidden_states": packed.reshape(batch, rows * columns, channels * 4),
            "encoder_hidden_states": prompt,
            "pooled_projections": text["pooled_prompt_embeds"],
            "timestep": sigma,
            "img_ids": ids.reshape(rows * columns, 3),
            "txt_ids": torch.zeros(prompt.shape[1], 3, device=latents.device),
            "guidance": torch.full_like(sigma, guidance) if config["guidance_embeds"] else None,
            "return_dict": False,
        }

    def velocity(self, output: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        """The output, unpacked."""
        batch, channels, height, width = latents.shape
        tokens = output.reshape(batch, height // 2, width // 2, channels, 2, 2)
        return tokens.permute(0, 3, 1, 4, 2, 5).reshape(batch, channels, height, width)

    def set_timesteps(self, scheduler: Any, steps: int, tokens: int, device: torch.device) -> None:
        """Sigmas from 1 to 1/steps, shifted by the number of image tokens where the scheduler asks for it."""
        sigmas = None if scheduler.config.get("use_flow_sigmas") else np.linspace(1.0, 1 / steps, steps)
        names = {"base_image_seq_len": 256, "max_image_seq_len": 4096, "base_shift": 0.5, "max_shift": 1.15}
        mu = calculate_shift(tokens, *(scheduler.config.get(name, default) for name, default in names.items()))
        if sigmas is None:
            scheduler.set_timesteps(steps, device=device, mu=mu)
        else:
            scheduler.set_timesteps(sigmas=sigmas, device=device, mu=mu)

    def preview_guidance(
        self, config: Mapping[str, Any], call: Mapping[str, Any], wanted: float | None
    ) -> tuple[float, float]:
        """Distilled models take guidance as an input; the others are drawn with classifier-free guidance, if any."""
        cfg = float(call.get("true_cfg_scale", 1.0))
        if config["guidance_embeds"]:
            embedded = wanted if wanted is not None else call.get("guidance_scale", self.defaults.preview_guidance)
            return float(embedded), cfg
        return 1.0, cfg if wanted is None else wanted
