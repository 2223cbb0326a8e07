"""Stable Diffusion 3 and 3.5 (medium, large): two streams, image tokens first; the last block ends the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from blockskip.families.base import Defaults, Text
from blockskip.families.kl import KLFamily
from blockskip.families.packing import shift_by_tokens
from blockskip.method.layout import IMAGE, TEXT, BlockLayout


class StableDiffusion3(KLFamily):
    """SD3Transformer2DModel with AutoencoderKL, two CLIPs and T5; time input 1000 sigma, output noise - x.

    The last block drops the text, and so does a stored tail. What only the text reads in the last trained block
    (``attn.add_q_proj``, ``attn.to_add_out``) changes nothing: LoRA there gets no gradient and stays zero.
    """

    name = "sd3"
    pipeline_class = "StableDiffusion3Pipeline"
    transformer_class = "SD3Transformer2DModel"
    layout = BlockLayout(lists=("transformer_blocks",), returns=(TEXT, IMAGE), order="img_txt")
    defaults = Defaults(
        full_resolution=1024, text_length=256, distribution="logit-normal", shift=3.0, guidance_scale=1.0,
        num_inference_steps=28, preview_guidance=7.0,
    )  # fmt: skip
    text_parts = (
        ("tokenizer", "text_encoder"),
        ("tokenizer_2", "text_encoder_2"),
        ("tokenizer_3", "text_encoder_3"),
    )
    optional_encoders = ("text_encoder_3",)
    lora_targets = (
        "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
        "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
    )  # fmt: skip
    text_in_blocks = False

    def token_patch(self, transformer_config: Mapping[str, Any]) -> int:
        """2 in the published models."""
        return int(transformer_config["patch_size"])

    def largest_side(self, vae_config: Mapping[str, Any], transformer_config: Mapping[str, Any]) -> int | None:
        """The side of the table of positions, of which a picture takes the centre (3072 for 3.5 large)."""
        return int(transformer_config["pos_embed_max_size"]) * self.pixel_stride(vae_config, transformer_config)

    def tokenize(self, tokenizers: Mapping[str, Any], prompts: Sequence[str], length: int) -> dict[str, torch.Tensor]:
        """Ids of both CLIPs in the first one's own length (77), T5 ids of ``length``; no mask is used."""
        limits = dict.fromkeys(("tokenizer", "tokenizer_2"), tokenizers["tokenizer"].model_max_length)
        limits["tokenizer_3"] = length
        shared = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
        return {
            encoder: tokenizers[part](list(prompts), max_length=limits[part], **shared).input_ids
            for part, encoder in self.text_parts
            if part in tokenizers
        }

    def token_counts(self, length: int) -> dict[str, int]:
        """77 for both CLIPs, which is their length in all published models; no mask."""
        return {"text_encoder": 77, "text_encoder_2": 77, "text_encoder_3": length}

    def text_places(self, ids: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
        """Both CLIPs' from the first token on, side by side; T5's after them."""
        places = {"text_encoder": 0, "text_encoder_2": 0, "text_encoder_3": ids["text_encoder"].shape[1]}
        return {name: (place,) for name, place in places.items() if name in ids}

    def encode_text(self, encoders: Mapping[str, nn.Module], ids: Mapping[str, torch.Tensor]) -> Text:
        """By encoder: ``<encoder>.embeds`` (B, tokens, D), of CLIP also ``<encoder>.pooled`` (B, P)."""
        found: Text = {}
        for name, encoder in encoders.items():
            if name == "text_encoder_3":
                found[f"{name}.embeds"] = encoder(ids[name])[0]
            else:
                output = encoder(ids[name], output_hidden_states=True)
                found[f"{name}.embeds"] = output.hidden_states[-2].to(encoder.dtype)
                found[f"{name}.pooled"] = output.text_embeds
        return found

    def join_text(self, config: Mapping[str, Any], text: Text, length: int) -> Text:
        """``prompt_embeds`` (B, 77 + length, D): the CLIPs side by side, then T5, or zeros for a T5 that is absent.

        ``pooled_prompt_embeds`` (B, P) are those of both CLIPs.
        """
        clips = torch.cat([text["text_encoder.embeds"], text["text_encoder_2.embeds"]], dim=-1)
        width = config["joint_attention_dim"]
        t5 = text.get("text_encoder_3.embeds")
        if t5 is None:
            t5 = clips.new_zeros(clips.shape[0], length, width)
        return {
            "prompt_embeds": torch.cat([F.pad(clips, (0, width - clips.shape[-1])), t5], dim=1),
            "pooled_prompt_embeds": torch.cat([text["text_encoder.pooled"], text["text_encoder_2.pooled"]], dim=-1),
        }

    def forward_inputs(
        self, config: Mapping[str, Any], latents: torch.Tensor, sigma: torch.Tensor, text: Text, guidance: float
    ) -> dict[str, Any]:
        """Latents as they are; the model takes the centre of its table of positions."""
        return {
            "hidden_states": latents,
            "encoder_hidden_states": text["prompt_embeds"],
            "pooled_projections": text["pooled_prompt_embeds"],
            "timestep": sigma * 1000,
            "return_dict": False,
        }

    def velocity(self, output: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        """The output as it is."""
        return output

    def set_timesteps(self, scheduler: Any, steps: int, tokens: int, device: torch.device) -> None:
        """The scheduler's own times, shifted by the number of image tokens where it asks for that."""
        if scheduler.config.get("use_dynamic_shifting"):
            scheduler.set_timesteps(steps, device=device, mu=shift_by_tokens(scheduler, tokens, 1.16))
        else:
            scheduler.set_timesteps(steps, device=device)
