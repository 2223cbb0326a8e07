"""Qwen-Image: two streams; prompts inside a template, each of its own length, encoded by a vision-language model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from blockskip.families.base import Defaults, Family, Text
from blockskip.families.packing import pack_tokens, shift_by_tokens, unpack_tokens
from blockskip.method.layout import IMAGE, TEXT, BlockLayout

#: The request around a prompt with which the model was trained, as its pipeline has it.
TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
#: Tokens of the template before the prompt; they are not given to the transformer.
DROPPED = 34


class QwenImage(Family):
    """QwenImageTransformer2DModel with AutoencoderKLQwenImage and Qwen2.5-VL; time input sigma, output noise - x."""

    name = "qwen_image"
    pipeline_class = "QwenImagePipeline"
    transformer_class = "QwenImageTransformer2DModel"
    layout = BlockLayout(lists=("transformer_blocks",), returns=(TEXT, IMAGE), order="txt_img")
    defaults = Defaults(
        full_resolution=1024, text_length=512, distribution="uniform", shift=1.0, guidance_scale=1.0,
        num_inference_steps=50, preview_guidance=4.0, negative_prompt=" ",
    )  # fmt: skip
    text_parts = (("tokenizer", "text_encoder"),)
    lora_targets = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0")
    text_in_blocks = False

    def vae_factor(self, vae_config: Mapping[str, Any]) -> int:
        """Halved once for each entry of the autoencoder's list."""
        return int(2 ** len(vae_config["temperal_downsample"]))

    def token_patch(self, transformer_config: Mapping[str, Any]) -> int:
        """The pipeline packs 2x2 latent pixels into a token."""
        return 2

    def largest_side(self, vae_config: Mapping[str, Any], transformer_config: Mapping[str, Any]) -> int:
        """The model has positions for 4096 tokens to each side of a picture's middle."""
        return 2 * 4096 * self.pixel_stride(vae_config, transformer_config)

    def latent_channels(self, vae_config: Mapping[str, Any]) -> int:
        """Channels before packing."""
        return int(vae_config["z_dim"])

    def tokenize(self, tokenizers: Mapping[str, Any], prompts: Sequence[str], length: int) -> dict[str, torch.Tensor]:
        """Ids and mask of the template with the prompt, at most ``length`` tokens after those that are dropped."""
        tokenizer = tokenizers["tokenizer"]
        tokenizer.padding_side = "right"
        tokens = tokenizer(
            [TEMPLATE.format(prompt) for prompt in prompts],
            padding=True,
            max_length=length + DROPPED,
            truncation=True,
            return_tensors="pt",
        )
        return {"text_encoder": tokens.input_ids, "mask": tokens.attention_mask}

    def token_counts(self, length: int) -> dict[str, int]:
        """Those of a prompt that fills ``length``."""
        return {"text_encoder": DROPPED + length, "mask": DROPPED + length}

    def text_places(self, ids: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
        """After the tokens of the template that are dropped."""
        return {"text_encoder": (-DROPPED,)}

    def encode_text(self, encoders: Mapping[str, nn.Module], ids: Mapping[str, torch.Tensor]) -> Text:
        """``prompt_embeds`` (B, tokens, D); of several prompts also ``prompt_embeds_mask`` (B, tokens).

        The head over the vocabulary is not run.
        """
        encoder: Any = encoders["text_encoder"]
        hidden = encoder.model(ids["text_encoder"], attention_mask=ids["mask"]).last_hidden_state
        embeds = hidden[:, DROPPED:].to(encoder.dtype)
        if embeds.shape[0] == 1:  # as long as its prompt
            return {"prompt_embeds": embeds}
        mask = ids["mask"][:, DROPPED:]
        return {"prompt_embeds": embeds * mask[:, :, None].to(embeds.dtype), "prompt_embeds_mask": mask}

    def encode_pixels(self, vae: Any, pixels: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """(mean + std * noise - latents_mean) / latents_std of the one frame, channel by channel."""
        posterior = vae.encode(pixels[:, :, None]).latent_dist
        latents: torch.Tensor = (posterior.mean + posterior.std * noise[:, :, None].to(posterior.mean.dtype))[:, :, 0]
        mean, scale = _statistics(vae, latents)
        return (latents - mean) * scale

    def decode(self, vae: Any, latents: torch.Tensor) -> torch.Tensor:
        """The decoder's one frame, after undoing the statistics."""
        mean, scale = _statistics(vae, latents)
        frames: torch.Tensor = vae.decode((latents / scale + mean)[:, :, None], return_dict=False)[0]
        return frames[:, :, 0]

    def forward_inputs(
        self, config: Mapping[str, Any], latents: torch.Tensor, sigma: torch.Tensor, text: Text, guidance: float
    ) -> dict[str, Any]:
        """Packed latents (B, h/2 * w/2, 4C); the model makes positions around the patch's centre.

        As in the pipeline, texts of one length go without a mask.
        """
        batch, _, height, width = latents.shape
        return {
            "hidden_states": pack_tokens(latents),
            "encoder_hidden_states": text["prompt_embeds"],
            "encoder_hidden_states_mask": text.get("prompt_embeds_mask"),
            "timestep": sigma,
            "img_shapes": [[(1, height // 2, width // 2)]] * batch,
            "return_dict": False,
        }

    def velocity(self, output: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        """The output, unpacked."""
        return unpack_tokens(output, latents)

    def guide(self, conditional: torch.Tensor, unconditional: torch.Tensor, scale: float) -> torch.Tensor:
        """Classifier-free guidance in which each token keeps the length that it has with the prompt."""
        own = pack_tokens(conditional)
        guided = pack_tokens(super().guide(conditional, unconditional, scale))
        lengths = own.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True)
        return unpack_tokens(guided * lengths, conditional)

    def set_timesteps(self, scheduler: Any, steps: int, tokens: int, device: torch.device) -> None:
        """Sigmas from 1 to 1/steps, shifted by the number of image tokens."""
        sigmas = np.linspace(1.0, 1 / steps, steps)
        scheduler.set_timesteps(sigmas=sigmas, device=device, mu=shift_by_tokens(scheduler, tokens))

    def preview_guidance(
        self, config: Mapping[str, Any], call: Mapping[str, Any], wanted: float | None
    ) -> tuple[float, float]:
        """Classifier-free guidance, which the pipeline calls ``true_cfg_scale``."""
        scale = wanted if wanted is not None else call.get("true_cfg_scale", self.defaults.preview_guidance)
        return 1.0, float(scale)


def _statistics(vae: Any, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean, 1 / deviation) of the autoencoder's channels, each (1, C, 1, 1), in the latents' dtype."""
    mean, std = (
        torch.tensor(values, device=latents.device).reshape(1, -1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return mean.to(latents.dtype), (1.0 / std).to(latents.dtype)
