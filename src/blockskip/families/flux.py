"""FLUX.1 (dev, schnell): two streams through double and single blocks."""

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
from blockskip.method.layout import IMAGE, TEXT, BlockLayout


class Flux(KLFamily):
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
    takes_positions = True

    def token_patch(self, transformer_config: Mapping[str, Any]) -> int:
        """The pipeline packs 2x2 latent pixels into a token."""
        return 2

    def prepare(self, model: Any) -> None:
        """Let each sample have ids of its own."""
        take_own_positions(model)

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
        """Packed latents (B, h/2 * w/2, 4C), ids from 0 on the patch's own grid."""
        rows, columns = latents.shape[2] // 2, latents.shape[3] // 2
        prompt = text["prompt_embeds"]
        return {
            "hidden_states": pack_tokens(latents),
            "encoder_hidden_states": prompt,
            "pooled_projections": text["pooled_prompt_embeds"],
            "timestep": sigma,
            "img_ids": grid_ids(rows, columns, 3, latents.device),
            "txt_ids": torch.zeros(prompt.shape[1], 3, device=latents.device),
            "guidance": torch.full_like(sigma, guidance) if config["guidance_embeds"] else None,
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
        mu = shift_by_tokens(scheduler, tokens)
        if scheduler.config.get("use_flow_sigmas"):
            scheduler.set_timesteps(steps, device=device, mu=mu)
        else:
            scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), device=device, mu=mu)

    def preview_guidance(
        self, config: Mapping[str, Any], call: Mapping[str, Any], wanted: float | None
    ) -> tuple[float, float]:
        """Distilled models take guidance as an input; the others are drawn with classifier-free guidance, if any."""
        cfg = float(call.get("true_cfg_scale", 1.0))
        if config["guidance_embeds"]:
            embedded = wanted if wanted is not None else call.get("guidance_scale", self.defaults.preview_guidance)
            return float(embedded), cfg
        return 1.0, cfg if wanted is None else wanted
