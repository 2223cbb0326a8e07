"""FLUX.2 (dev, klein): two streams, then one joint stream; several layers of a language model side by side as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu, format_input
from torch import nn

from blockskip.families.base import Defaults, Family, Text
from blockskip.families.packing import grid_ids
from blockskip.families.placing import side_by_side, take_own_positions
from blockskip.families.prompts import filled_ids
from blockskip.method.layout import IMAGE, TEXT, BlockLayout


class Flux2(Family):
    """FLUX.2-dev: Flux2Transformer2DModel with AutoencoderKLFlux2 and Mistral 3; time input sigma, output noise - x.

    Latents (B, 4C, h/2, w/2) are the autoencoder's (B, C, h, w) in patches of 2x2, normalised channel by channel; each
    place is a token.
    """

    name = "flux2"
    pipeline_class = "Flux2Pipeline"
    transformer_class = "Flux2Transformer2DModel"
    layout = BlockLayout(
        lists=("transformer_blocks", "single_transformer_blocks"),
        returns={"transformer_blocks": (TEXT, IMAGE), "single_transformer_blocks": (IMAGE,)},
        order="txt_img",
    )
    defaults = Defaults(
        full_resolution=1024, text_length=512, distribution="uniform", shift=1.0, guidance_scale=1.0,
        num_inference_steps=50, preview_guidance=4.0,
    )  # fmt: skip
    text_parts = (("tokenizer", "text_encoder"),)
    lora_targets = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.to_qkv_mlp_proj", "attn.to_out")
    text_in_blocks = False
    takes_positions = True
    #: States of the language model that make the text, by number; 0 is its input.
    text_states = (10, 20, 30)

    def vae_factor(self, vae_config: Mapping[str, Any]) -> int:
        """Halved once between each two levels of the autoencoder, and by the patches (16 for the published one)."""
        return int(2 ** (len(vae_config["block_out_channels"]) - 1)) * 2

    def token_patch(self, transformer_config: Mapping[str, Any]) -> int:
        """Latents are patches already."""
        return 1

    def prepare(self, model: Any) -> None:
        """Let each sample have ids of its own."""
        take_own_positions(model)

    def latent_channels(self, vae_config: Mapping[str, Any]) -> int:
        """Those of a patch of 2x2 (128 for the published autoencoder)."""
        return int(vae_config["latent_channels"]) * 4

    def tokenize(self, tokenizers: Mapping[str, Any], prompts: Sequence[str], length: int) -> dict[str, torch.Tensor]:
        """Ids and mask of the prompt behind the pipeline's instruction, in the processor's chat format."""
        tokens = tokenizers["tokenizer"].apply_chat_template(
            format_input(list(prompts)),
            add_generation_prompt=False,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            padding="max_length",
            truncation=True,
            max_length=length,
        )
        return {"text_encoder": tokens["input_ids"], "mask": tokens["attention_mask"]}

    def encode_text(self, encoders: Mapping[str, nn.Module], ids: Mapping[str, torch.Tensor]) -> Text:
        """``prompt_embeds`` (B, length, 3D), padding included, which the transformer reads too; no head is run."""
        encoder: Any = encoders["text_encoder"]
        output = encoder.model(
            input_ids=ids["text_encoder"], attention_mask=ids["mask"], output_hidden_states=True, use_cache=False
        )
        states = torch.cat([output.hidden_states[number] for number in self.text_states], dim=-1)
        return {"prompt_embeds": states.to(encoder.dtype)}

    def encode_pixels(self, vae: Any, pixels: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """The distribution's mode in patches of 2x2, normalised by the autoencoder's statistics."""
        mean, std = _statistics(vae)
        patches = F.pixel_unshuffle(vae.encode(pixels).latent_dist.mode(), 2)
        return (patches - mean.to(patches.dtype)) / std.to(patches.dtype)

    def decode(self, vae: Any, latents: torch.Tensor) -> torch.Tensor:
        """The decoder after undoing statistics and patches."""
        mean, std = _statistics(vae)
        patches = latents * std.to(latents.dtype) + mean.to(latents.dtype)
        pixels: torch.Tensor = vae.decode(F.pixel_shuffle(patches, 2), return_dict=False)[0]
        return pixels

    def forward_inputs(
        self, config: Mapping[str, Any], latents: torch.Tensor, sigma: torch.Tensor, text: Text, guidance: float
    ) -> dict[str, Any]:
        """Tokens (B, h * w, C); ids (0, row, column, 0) on the patch's own grid, and (0, 0, 0, n) of the text."""
        rows, columns = latents.shape[2:]
        prompt = text["prompt_embeds"]
        words = torch.zeros(prompt.shape[1], 4, device=latents.device)
        words[:, 3] += torch.arange(prompt.shape[1], device=latents.device)
        return {
            "hidden_states": latents.flatten(2).transpose(1, 2),
            "encoder_hidden_states": prompt,
            "timestep": sigma,
            "img_ids": grid_ids(rows, columns, 4, latents.device),
            "txt_ids": words,
            "guidance": torch.full_like(sigma, guidance) if config["guidance_embeds"] else None,
            "return_dict": False,
        }

    def placed(self, inputs: Mapping[str, Any], positions: torch.Tensor) -> dict[str, Any]:
        """Ids of the image and of the text, of each sample side by side."""
        return side_by_side(inputs, positions)

    def velocity(self, output: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        """The output, token by token in its place."""
        return output.transpose(1, 2).reshape(latents.shape)

    def set_timesteps(self, scheduler: Any, steps: int, tokens: int, device: torch.device) -> None:
        """Sigmas from 1 to 1/steps, shifted by the numbers of image tokens and of steps."""
        mu = compute_empirical_mu(image_seq_len=tokens, num_steps=steps)
        if scheduler.config.get("use_flow_sigmas"):
            scheduler.set_timesteps(steps, device=device, mu=mu)
        else:
            scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), device=device, mu=mu)

    def preview_guidance(
        self, config: Mapping[str, Any], call: Mapping[str, Any], wanted: float | None
    ) -> tuple[float, float]:
        """Guidance is an input of the distilled model, which draws without classifier-free guidance."""
        scale = super().preview_guidance(config, call, wanted)[1]
        return (scale, 1.0) if config["guidance_embeds"] else (1.0, scale)


class Flux2Klein(Flux2):
    """FLUX.2-klein: the same transformer without guidance input, and Qwen 3."""

    name = "flux2_klein"
    pipeline_class = "Flux2KleinPipeline"
    text_states = (9, 18, 27)

    def tokenize(self, tokenizers: Mapping[str, Any], prompts: Sequence[str], length: int) -> dict[str, torch.Tensor]:
        """Ids and mask of the prompt in the tokenizer's chat format, ready for an answer without thinking."""
        tokenizer = tokenizers["tokenizer"]
        messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
        texts = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        return filled_ids(tokenizer, texts, length)

    def pipeline_call(self, index: Mapping[str, Any]) -> dict[str, Any]:
        """Models distilled to a few steps draw without guidance."""
        return {"guidance_scale": 1.0, "num_inference_steps": 4} if index.get("is_distilled") else {}


def _statistics(vae: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean, deviation) of the patches' channels, each (1, 4C, 1, 1)."""
    mean = vae.bn.running_mean.reshape(1, -1, 1, 1)
    std = torch.sqrt(vae.bn.running_var.reshape(1, -1, 1, 1) + vae.config.batch_norm_eps)
    return mean, std
