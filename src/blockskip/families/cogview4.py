"""CogView4: two streams; prompts filled on the left to a multiple of 16 tokens, and the size of the picture told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_cogview4 import CogView4AttnProcessor
from diffusers.pipelines.cogview4.pipeline_cogview4 import calculate_shift
from torch import nn
from torch.overrides import TorchFunctionMode

from blockskip.families.base import Defaults, Text
from blockskip.families.kl import KLFamily
from blockskip.method.layout import IMAGE, TEXT, BlockLayout

#: Texts are filled to a multiple of this number of tokens; what they are filled with is read like the rest.
MULTIPLE = 16
#: Pixels per latent pixel of the published autoencoder, by which the model is told a picture's size.
VAE_FACTOR = 8


class CogView4(KLFamily):
    """CogView4Transformer2DModel with AutoencoderKL and GLM-4; time input 1000 sigma, output noise - x."""

    name = "cogview4"
    pipeline_class = "CogView4Pipeline"
    transformer_class = "CogView4Transformer2DModel"
    layout = BlockLayout(lists=("transformer_blocks",), returns=(IMAGE, TEXT), order="txt_img")
    defaults = Defaults(
        full_resolution=1024, text_length=1024, distribution="uniform", shift=1.0, guidance_scale=1.0,
        num_inference_steps=50, preview_guidance=5.0,
    )  # fmt: skip
    text_parts = (("tokenizer", "text_encoder"),)
    lora_targets = ("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0")
    text_in_blocks = False

    def token_patch(self, transformer_config: Mapping[str, Any]) -> int:
        """2 in the published model."""
        return int(transformer_config["patch_size"])

    def prepare(self, model: Any) -> None:
        """Let attention leave out the tokens that fill the shorter texts of a batch."""
        for block in model.transformer_blocks:
            block.attn1.set_processor(RaggedTexts())  # type: ignore[no-untyped-call]

    def tokenize(self, tokenizers: Mapping[str, Any], prompts: Sequence[str], length: int) -> dict[str, torch.Tensor]:
        """Ids of the longest prompt's length, at most ``length``, filled on the left; no mask, as in the pipeline."""
        tokenizer = tokenizers["tokenizer"]
        ids = tokenizer(
            list(prompts),
            padding="longest",
            max_length=length,
            truncation=True,
            add_special_tokens=True,
            return_tensors="pt",
        ).input_ids
        return {"text_encoder": F.pad(ids, (-ids.shape[1] % MULTIPLE, 0), value=tokenizer.pad_token_id)}

    def token_counts(self, length: int) -> dict[str, int]:
        """The next multiple of 16."""
        return {"text_encoder": length + -length % MULTIPLE}

    def encode_text(self, encoders: Mapping[str, nn.Module], ids: Mapping[str, torch.Tensor]) -> Text:
        """``prompt_embeds`` (B, tokens, D)."""
        encoder: Any = encoders["text_encoder"]
        hidden = encoder(ids["text_encoder"], output_hidden_states=True).hidden_states[-2]
        return {"prompt_embeds": hidden.to(encoder.dtype)}

    def forward_inputs(
        self, config: Mapping[str, Any], latents: torch.Tensor, sigma: torch.Tensor, text: Text, guidance: float
    ) -> dict[str, Any]:
        """Latents as they are, told as a picture of the patch's size that is not cut out of another one."""
        embeds = text["prompt_embeds"]
        batch, _, rows, columns = latents.shape
        size = embeds.new_tensor([[float(rows * VAE_FACTOR), float(columns * VAE_FACTOR)]]).repeat(batch, 1)
        return {
            "hidden_states": latents,
            "encoder_hidden_states": embeds,
            "timestep": sigma * 1000,
            "original_size": size,
            "target_size": size,
            "crop_coords": torch.zeros_like(size),
            "attention_mask": text.get("prompt_embeds_mask"),
            "return_dict": False,
        }

    def velocity(self, output: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        """The output as it is."""
        return output

    def set_timesteps(self, scheduler: Any, steps: int, tokens: int, device: torch.device) -> None:
        """Whole times from 1000 to 1, shifted by the number of image tokens."""
        last = scheduler.config.num_train_timesteps
        times = np.linspace(last, 1.0, steps).astype(np.int64).astype(np.float32)
        names = {"base_image_seq_len": 256, "base_shift": 0.25, "max_shift": 0.75}
        mu = calculate_shift(tokens, *(scheduler.config.get(name, default) for name, default in names.items()))
        scheduler.set_timesteps(timesteps=times, sigmas=times / last, device=device, mu=mu)


class RaggedTexts(CogView4AttnProcessor):
    """The model's own attention, whose mask of the text (B, tokens) is one: its own adds 1 to the scores of text.

    Without a mask nothing differs.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Image tokens (B, tokens, D) and text tokens (B, tokens, D) after attention."""
        streams = (attn, hidden_states, encoder_hidden_states)
        if attention_mask is None:
            own = super().__call__(*streams, image_rotary_emb=image_rotary_emb)
        else:
            seen = F.pad(attention_mask.bool(), (0, hidden_states.shape[1]), value=True)
            with _Seen(seen[:, None, None]):
                own = super().__call__(*streams, image_rotary_emb=image_rotary_emb)
        return own


class _Seen(TorchFunctionMode):
    """Inside, attention sees the keys of a mask, bool (B, 1, 1, keys)."""

    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__()
        self._mask = mask

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            options["attn_mask"] = self._mask
        return func(*args, **options)
