"""The side of a family whose autoencoder is AutoencoderKL: a distribution of latents, one scale and one shift."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from blockskip.families.base import Family


class KLFamily(Family):
    """A family with AutoencoderKL: latents = (x - shift) * scale, without a shift where the autoencoder has none."""

    def vae_factor(self, vae_config: Mapping[str, Any]) -> int:
        """Halved once between each two levels of the autoencoder."""
        return int(2 ** (len(vae_config["block_out_channels"]) - 1))

    def latent_channels(self, vae_config: Mapping[str, Any]) -> int:
        """Channels before the transformer packs them."""
        return int(vae_config["latent_channels"])

    def encode_pixels(self, vae: Any, pixels: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """(mean + std * noise - shift) * scale."""
        posterior = vae.encode(pixels).latent_dist
        latents = posterior.mean + posterior.std * noise.to(posterior.mean.dtype)
        scaled: torch.Tensor = (latents - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor
        return scaled

    def decode(self, vae: Any, latents: torch.Tensor) -> torch.Tensor:
        """The decoder after undoing scale and shift."""
        scaled = latents / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
        pixels: torch.Tensor = vae.decode(scaled, return_dict=False)[0]
        return pixels
