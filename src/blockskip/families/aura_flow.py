"""AuraFlow: two streams, then one joint stream, with learned tokens ahead of the text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from blockskip.families.base import Defaults, Text
from blockskip.families.kl import KLFamily
from blockskip.families.prompts import filled_ids
from blockskip.method.layout import IMAGE, TEXT, BlockLayout

#: Learned tokens that the model puts ahead of the text.
LEARNED = 8


def _with_learned(inputs: Mapping[str, Any]) -> int:
    """Text tokens that enter the blocks, from the arguments of ``forward``."""
    return LEARNED + int(inputs[TEXT].shape[1])


class AuraFlow(KLFamily):
    """AuraFlowTransformer2DModel with AutoencoderKL and UMT5; time input sigma, output noise - x.

    Padding of the text is zeros, which the transformer reads.
    """

    name = "aura_flow"
    pipeline_class = "AuraFlowPipeline"
    transformer_class = "AuraFlowTransformer2DModel"
    layout = BlockLayout(
        lists=("joint_transformer_blocks", "single_transformer_blocks"),
        returns={"joint_transformer_blocks": (TEXT, IMAGE), "single_transformer_blocks": (IMAGE,)},
        order="txt_img", joint_text=_with_learned,
    )  # fmt: skip
    defaults = Defaults(
        full_resolution=1024, text_length=256, distribution="uniform", shift=1.73, guidance_scale=1.0,
        num_inference_steps=50, preview_guidance=3.5,
    )  # fmt: skip
    text_parts = (("tokenizer", "text_encoder"),)
    lora_targets = (
        "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
        "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
    )  # fmt: skip
    text_in_blocks = False

    def token_patch(self, transformer_config: Mapping[str, Any]) -> int:
        """2 in the published models."""
        return int(transformer_config["patch_size"])

    def largest_side(self, vae_config: Mapping[str, Any], transformer_config: Mapping[str, Any]) -> int | None:
        """The side of the table of positions, of which a picture takes the centre."""
        side = math.isqrt(transformer_config["pos_embed_max_size"])
        return side * self.pixel_stride(vae_config, transformer_config)

    def tokenize(self, tokenizers: Mapping[str, Any], prompts: Sequence[str], length: int) -> dict[str, torch.Tensor]:
        """UMT5 ids and mask of ``length``."""
        return filled_ids(tokenizers["tokenizer"], prompts, length)

    def text_places(self, ids: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
        """After the learned tokens."""
        return {"text_encoder": (LEARNED,)}

    def encode_text(self, encoders: Mapping[str, nn.Module], ids: Mapping[str, torch.Tensor]) -> Text:
        """``prompt_embeds`` (B, length, D), zero in the place of padding."""
        encoder: Any = encoders["text_encoder"]
        embeds = encoder(ids["text_encoder"], attention_mask=ids["mask"])[0]
        return {"prompt_embeds": (embeds * ids["mask"][:, :, None]).to(encoder.dtype)}

    def forward_inputs(
        self, config: Mapping[str, Any], latents: torch.Tensor, sigma: torch.Tensor, text: Text, guidance: float
    ) -> dict[str, Any]:
        """Latents as they are; the model takes the centre of its table of positions."""
        return {
            "hidden_states": latents,
            "encoder_hidden_states": text["prompt_embeds"],
            "timestep": sigma,
            "return_dict": False,
        }

    def velocity(self, output: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        """The output as it is."""
        return output

    def set_timesteps(self, scheduler: Any, steps: int, tokens: int, device: torch.device) -> None:
        """The scheduler's own times."""
        scheduler.set_timesteps(steps, device=device)
