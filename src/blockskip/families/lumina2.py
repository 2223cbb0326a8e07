"""Lumina-Image 2.0: one stream of text and image tokens, which starts in each sample where its own text ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from blockskip.families.base import Defaults, Text
from blockskip.families.kl import KLFamily
from blockskip.families.packing import shift_by_tokens
from blockskip.families.prompts import filled_ids
from blockskip.method.layout import IMAGE, BlockLayout

#: What the pipeline says ahead of a prompt.
SYSTEM = (
    "You are an assistant designed to generate superior images with the superior degree of image-text alignment based "
    "on textual prompts or user prompts."
)
#: Latent channels of the published model, which its pipeline counts where others count image tokens.
CHANNELS = 16


class Lumina2(KLFamily):
    """Lumina2Transformer2DModel with AutoencoderKL and Gemma-2; time input 1 - sigma, output x - noise.

    The text of a sample goes without padding. An empty prompt goes without the instruction ahead of it, as the pipeline
    has it in classifier-free guidance.
    """

    name = "lumina2"
    pipeline_class = "Lumina2Pipeline"
    transformer_class = "Lumina2Transformer2DModel"
    layout = BlockLayout(lists=("layers",), returns=(IMAGE,), order="txt_img")
    defaults = Defaults(
        full_resolution=1024, text_length=256, distribution="uniform", shift=1.0, guidance_scale=1.0,
        num_inference_steps=30, preview_guidance=4.0,
    )  # fmt: skip
    text_parts = (("tokenizer", "text_encoder"),)
    lora_targets = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0")
    text_in_blocks = False

    def token_patch(self, transformer_config: Mapping[str, Any]) -> int:
        """2 in the published model."""
        return int(transformer_config["patch_size"])

    def largest_side(self, vae_config: Mapping[str, Any], transformer_config: Mapping[str, Any]) -> int | None:
        """The side of the tables of positions (8192 for the published model)."""
        return int(min(transformer_config["axes_lens"][1:])) * self.pixel_stride(vae_config, transformer_config)

    def tokenize(self, tokenizers: Mapping[str, Any], prompts: Sequence[str], length: int) -> dict[str, torch.Tensor]:
        """Gemma ids and mask, padded on the right to ``length``; and ``kept``, as long as the longest prompt."""
        tokenizer = tokenizers["tokenizer"]
        tokenizer.padding_side = "right"
        ids = filled_ids(
            tokenizer, [f"{SYSTEM} <Prompt Start> {prompt}" if prompt else "" for prompt in prompts], length
        )
        return ids | {"kept": ids["mask"][:, : int(ids["mask"].sum(1).max())]}

    def token_counts(self, length: int) -> dict[str, int]:
        """Those of a prompt that fills ``length``."""
        return {"text_encoder": length, "mask": length, "kept": length}

    def encode_text(self, encoders: Mapping[str, nn.Module], ids: Mapping[str, torch.Tensor]) -> Text:
        """``prompt_embeds`` (B, tokens, D); of several prompts also ``prompt_embeds_mask`` (B, tokens)."""
        encoder: Any = encoders["text_encoder"]
        output = encoder(ids["text_encoder"], attention_mask=ids["mask"], output_hidden_states=True)
        mask = ids["kept"]
        embeds = output.hidden_states[-2][:, : mask.shape[1]].to(encoder.dtype)
        if embeds.shape[0] == 1:  # as long as its prompt
            return {"prompt_embeds": embeds}
        return {"prompt_embeds": embeds * mask[:, :, None].to(embeds.dtype), "prompt_embeds_mask": mask}

    def forward_inputs(
        self, config: Mapping[str, Any], latents: torch.Tensor, sigma: torch.Tensor, text: Text, guidance: float
    ) -> dict[str, Any]:
        """Latents as they are; positions from 0 on the patch's own grid."""
        embeds, mask = text["prompt_embeds"], text.get("prompt_embeds_mask")
        return {
            "hidden_states": latents,
            "encoder_hidden_states": embeds,
            "encoder_attention_mask": WholeTexts(embeds) if mask is None else mask,
            "timestep": 1 - sigma,
            "return_dict": False,
        }

    def velocity(self, output: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        """The output with the other sign."""
        return -output

    def guide(self, conditional: torch.Tensor, unconditional: torch.Tensor, scale: float) -> torch.Tensor:
        """Classifier-free guidance in which each row of latents keeps the length that it has with the prompt."""
        guided = super().guide(conditional, unconditional, scale)
        lengths: torch.Tensor = conditional.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True)
        return guided * lengths

    def set_timesteps(self, scheduler: Any, steps: int, tokens: int, device: torch.device) -> None:
        """Sigmas from 1 to 1/steps, moved by the scheduler's own shift."""
        sigmas = np.linspace(1.0, 1 / steps, steps)
        scheduler.set_timesteps(sigmas=sigmas, device=device, mu=shift_by_tokens(scheduler, CHANNELS))


class WholeTexts:
    """Stands for the mask of texts without padding: the model counts its tokens, and here no value is read for that.

    Args:
        embeds: the texts (B, tokens, D).
    """

    def __init__(self, embeds: torch.Tensor) -> None:
        self.shape, self._device = embeds.shape[:2], embeds.device

    def sum(self, dim: int) -> WholeTexts:
        """The count of tokens of each text, for ``tolist``."""
        return self

    def tolist(self) -> list[int]:
        """The count of tokens of each text."""
        return [self.shape[1]] * self.shape[0]

    def bool(self) -> torch.Tensor:
        """The mask itself, (B, tokens), True."""
        return torch.ones(self.shape, dtype=torch.bool, device=self._device)
