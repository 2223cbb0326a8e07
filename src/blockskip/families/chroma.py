"""Chroma: FLUX.1's streams with T5 alone, a mask of the text, and modulation that every block gets from one module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from blockskip.families.base import Defaults, Text
from blockskip.families.kl import KLFamily
from blockskip.families.packing import grid_ids, pack_tokens, shift_by_tokens, unpack_tokens
from blockskip.families.placing import side_by_side, take_own_positions
from blockskip.families.prompts import filled_ids
from blockskip.method.layout import IMAGE, TEXT, BlockLayout


class Chroma(KLFamily):
    """ChromaTransformer2DModel with AutoencoderKL and T5; time input sigma, output noise - x.

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
    lora_targets = (
        "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
        "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
        "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2",
    )  # fmt: skip
    text_in_blocks = False
    takes_positions = True

    def token_patch(self, transformer_config: Mapping[str, Any]) -> int:
        """The pipeline packs 2x2 latent pixels into a token."""
        return 2

    def prepare(self, model: Any) -> None:
        """Let each sample have ids of its own."""
        take_own_positions(model)

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
        """Packed latents (B, h/2 * w/2, 4C), ids from 0 on the patch's own grid, the mask of text and image tokens."""
        rows, columns = latents.shape[2] // 2, latents.shape[3] // 2
        prompt, mask = text["prompt_embeds"], text["prompt_attention_mask"]
        return {
            "hidden_states": pack_tokens(latents),
            "encoder_hidden_states": prompt,
            "timestep": sigma,
            "img_ids": grid_ids(rows, columns, 3, latents.device),
            "txt_ids": torch.zeros(prompt.shape[1], 3, device=latents.device),
            "attention_mask": torch.cat([mask, mask.new_ones(mask.shape[0], rows * columns)], dim=1).to(latents.dtype),
            "return_dict": False,
        }

    def placed(self, inputs: Mapping[str, Any], positions: torch.Tensor) -> dict[str, Any]:
        """Ids of the image and of the text, of each sample side by side."""
        return side_by_side(inputs, positions)

    def velocity(self, output: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        """The output, unpacked."""
        return unpack_tokens(output, latents)

    def set_timesteps(self, scheduler: Any, steps: int, tokens: int, device: torch.device) -> None:
        """Sigmas from 1 to 1/steps, shifted by the number of image tokens where the scheduler asks for it."""
        sigmas = np.linspace(1.0, 1 / steps, steps)
        scheduler.set_timesteps(sigmas=sigmas, device=device, mu=shift_by_tokens(scheduler, tokens))

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
