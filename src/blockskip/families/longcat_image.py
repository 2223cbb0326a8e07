"""LongCat-Image: FLUX.1's streams with a vision-language model's text, whose positions lie ahead of the image's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers.pipelines.longcat_image.pipeline_longcat_image import split_quotation
from torch import nn

from blockskip.families.base import Defaults, Text
from blockskip.families.flux_like import FluxLike
from blockskip.families.packing import pack_tokens, unpack_tokens, word_ids

#: What the pipeline says ahead of a prompt and after it, and the tokens of both, which the transformer is not given.
AHEAD = (
    "<|im_start|>system\nAs an image captioning expert, generate a descriptive text prompt based on an image content, "
    "suitable for input to a text-to-image model.<|im_end|>\n<|im_start|>user\n"
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n"
TOKENS_AHEAD, TOKENS_AFTER = 36, 5


class LongCatImage(FluxLike):
    """LongCatImageTransformer2DModel with AutoencoderKL and Qwen2.5-VL.

    Prompts go as they are: the pipeline by default has its language model write them anew.
    """

    name = "longcat_image"
    pipeline_class = "LongCatImagePipeline"
    transformer_class = "LongCatImageTransformer2DModel"
    defaults = Defaults(
        full_resolution=1024, text_length=512, distribution="uniform", shift=1.0, guidance_scale=1.0,
        num_inference_steps=50, preview_guidance=4.5,
    )  # fmt: skip
    text_parts = (("tokenizer", "text_encoder"),)

    def tokenize(self, tokenizers: Mapping[str, Any], prompts: Sequence[str], length: int) -> dict[str, torch.Tensor]:
        """Ids and mask of the prompt, filled to ``length``, inside the template; quoted text letter by letter."""
        tokenizer = tokenizers["tokenizer"]

        def ids(text: str) -> list[int]:
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])

        words = []
        for prompt in prompts:
            found: list[tuple[str, bool]] = split_quotation(prompt)  # type: ignore[no-untyped-call]
            parts = [part for text, quoted in found for part in (text if quoted else [text])]
            words.append([number for part in parts for number in ids(part)][:length])
        filled = tokenizer.pad(
            {"input_ids": words}, max_length=length, padding="max_length", return_attention_mask=True,
            return_tensors="pt",
        )  # fmt: skip
        ahead, after = (torch.tensor([ids(text)] * len(words), dtype=torch.int64) for text in (AHEAD, AFTER))
        return {
            "text_encoder": torch.cat([ahead, filled["input_ids"].long(), after], dim=1),
            "mask": torch.cat([torch.ones_like(ahead), filled["attention_mask"].long(), torch.ones_like(after)], dim=1),
        }

    def token_counts(self, length: int) -> dict[str, int]:
        """With the template."""
        return dict.fromkeys(("text_encoder", "mask"), TOKENS_AHEAD + length + TOKENS_AFTER)

    def text_places(self, ids: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
        """After the tokens of the template that are dropped."""
        return {"text_encoder": (-TOKENS_AHEAD,)}

    def encode_text(self, encoders: Mapping[str, nn.Module], ids: Mapping[str, torch.Tensor]) -> Text:
        """``prompt_embeds`` (B, length, D), padding included, which the transformer reads too; no head is run."""
        encoder: Any = encoders["text_encoder"]
        hidden = encoder.model(ids["text_encoder"], attention_mask=ids["mask"]).last_hidden_state
        return {"prompt_embeds": hidden[:, TOKENS_AHEAD:-TOKENS_AFTER].to(encoder.dtype)}

    def forward_inputs(
        self, config: Mapping[str, Any], latents: torch.Tensor, sigma: torch.Tensor, text: Text, guidance: float
    ) -> dict[str, Any]:
        """With ids (0, n, n) of the text, and (1, row, column) counted from its end on."""
        inputs = super().forward_inputs(config, latents, sigma, text, guidance)
        words = text["prompt_embeds"].shape[1]
        inputs["img_ids"][:, 0] += 1
        inputs["img_ids"][:, 1:] += words
        return inputs | {"txt_ids": word_ids(words, latents.device)}

    def guide(self, conditional: torch.Tensor, unconditional: torch.Tensor, scale: float) -> torch.Tensor:
        """Classifier-free guidance in which no token becomes longer than it is with the prompt."""
        own = pack_tokens(conditional)
        guided = pack_tokens(super().guide(conditional, unconditional, scale))
        lengths = own.norm(dim=-1, keepdim=True) / (guided.norm(dim=-1, keepdim=True) + 1e-8)
        return unpack_tokens(guided * lengths.clamp(max=1.0), conditional)
