"""Z-Image (base, Turbo): one stream of image and text tokens; samples go in and out one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from blockskip.families.base import Defaults, Text
from blockskip.families.kl import KLFamily
from blockskip.families.packing import shift_by_tokens
from blockskip.families.prompts import filled_ids
from blockskip.method.layout import IMAGE, BlockLayout

#: The model fills the text and the image of a sample to a multiple of this number of tokens.
MULTIPLE = 32


def _filled_text(inputs: Mapping[str, Any]) -> int:
    """Text tokens of the longest sample in the joint stream, from the arguments of ``forward``."""
    return max(-(-len(text) // MULTIPLE) for text in inputs["cap_feats"]) * MULTIPLE


class ZImage(KLFamily):
    """ZImageTransformer2DModel with AutoencoderKL and Qwen 3; time input 1 - sigma, output x - noise.

    The text of a sample goes without padding; the model fills it, and the image, to a multiple of 32 tokens.
    """

    name = "z_image"
    pipeline_class = "ZImagePipeline"
    transformer_class = "ZImageTransformer2DModel"
    layout = BlockLayout(
        lists=("layers",), returns=(IMAGE,), head="all_final_layer", order="img_txt", joint_text=_filled_text
    )
    defaults = Defaults(
        full_resolution=1024, text_length=512, distribution="uniform", shift=3.0, guidance_scale=1.0,
        num_inference_steps=50, preview_guidance=5.0,
    )  # fmt: skip
    text_parts = (("tokenizer", "text_encoder"),)
    lora_targets = ("attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0")
    text_in_blocks = False

    def token_patch(self, transformer_config: Mapping[str, Any]) -> int:
        """2 in the published models."""
        return int(transformer_config["all_patch_size"][0])

    def largest_side(self, vae_config: Mapping[str, Any], transformer_config: Mapping[str, Any]) -> int | None:
        """The side of the tables of positions (8192 for the published models)."""
        return int(min(transformer_config["axes_lens"][1:])) * self.pixel_stride(vae_config, transformer_config)

    def tokenize(self, tokenizers: Mapping[str, Any], prompts: Sequence[str], length: int) -> dict[str, torch.Tensor]:
        """Ids of the prompt in the tokenizer's chat format, filled to ``length``; the mask is that of the longest."""
        tokenizer = tokenizers["tokenizer"]
        tokenizer.padding_side = "right"
        messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
        texts = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=True
        )
        ids = filled_ids(tokenizer, texts, length)
        return ids | {"mask": ids["mask"][:, : int(ids["mask"].sum(dim=1).max())]}

    def encode_text(self, encoders: Mapping[str, nn.Module], ids: Mapping[str, torch.Tensor]) -> Text:
        """``prompt_embeds`` (B, tokens, D); of several prompts also ``prompt_embeds_mask`` (B, tokens).

        The head over the vocabulary, if there is one, is not run.
        """
        encoder: Any = encoders["text_encoder"]
        mask = ids["mask"]
        filled = torch.zeros_like(ids["text_encoder"])
        filled[:, : mask.shape[1]] = mask
        output = getattr(encoder, "model", encoder)(
            input_ids=ids["text_encoder"], attention_mask=filled.bool(), output_hidden_states=True, use_cache=False
        )
        embeds = output.hidden_states[-2][:, : mask.shape[1]].to(encoder.dtype)
        if embeds.shape[0] == 1:  # as long as its prompt
            return {"prompt_embeds": embeds}
        return {"prompt_embeds": embeds * mask[:, :, None].to(embeds.dtype), "prompt_embeds_mask": mask}

    def encode_pixels(self, vae: Any, pixels: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """(mode - shift) * scale."""
        latents: torch.Tensor = (
            vae.encode(pixels).latent_dist.mode() - vae.config.shift_factor
        ) * vae.config.scaling_factor
        return latents

    def forward_inputs(
        self, config: Mapping[str, Any], latents: torch.Tensor, sigma: torch.Tensor, text: Text, guidance: float
    ) -> dict[str, Any]:
        """Samples one by one, each (C, 1, h, w) with its own text; positions from 0 on the patch's own grid.

        Where texts differ in length, their lengths are read from the mask: shapes depend on them.
        """
        embeds, mask = text["prompt_embeds"], text.get("prompt_embeds_mask")
        counts = [embeds.shape[1]] * embeds.shape[0] if mask is None else mask.sum(dim=1).tolist()
        return {
            "x": list(latents[:, :, None].unbind(0)),
            "t": (1000 - 1000 * sigma) / 1000,
            "cap_feats": [own[:count] for own, count in zip(embeds, counts, strict=True)],
            "return_dict": False,
        }

    def velocity(self, output: Any, latents: torch.Tensor) -> torch.Tensor:
        """The samples' outputs with the other sign."""
        return -torch.stack(list(output))[:, :, 0]

    def guide(self, conditional: torch.Tensor, unconditional: torch.Tensor, scale: float) -> torch.Tensor:
        """c + (scale - 1) * (c - u), rounded as in the pipeline."""
        return conditional + (scale - 1) * (conditional - unconditional)

    def set_timesteps(self, scheduler: Any, steps: int, tokens: int, device: torch.device) -> None:
        """Sigmas from 1 to 1/steps, shifted as the scheduler has it."""
        sigmas = torch.linspace(1.0, 1 / steps, steps).tolist()
        scheduler.set_timesteps(sigmas=sigmas, device=device, mu=shift_by_tokens(scheduler, tokens))

    def preview_guidance(
        self, config: Mapping[str, Any], call: Mapping[str, Any], wanted: float | None
    ) -> tuple[float, float]:
        """The pipeline counts guidance from 0, where there is none (as Turbo is drawn)."""
        return 1.0, 1.0 + super().preview_guidance(config, call, wanted)[1]
