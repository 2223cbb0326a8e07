"""HiDream-I1: two streams, then a joint one, image first; every block gets a Llama layer of its own; routed experts.

block i    image | T5, last Llama layer | Llama layer i     the last part is dropped after the block
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import UniPCMultistepScheduler
from diffusers.models.transformers.transformer_hidream_image import MOEFeedForwardSwiGLU
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from blockskip.families.base import Defaults, Text
from blockskip.families.kl import KLFamily
from blockskip.families.packing import grid_ids
from blockskip.method.layout import IMAGE, TEXT, BlockLayout

#: Most ids that the pipeline gives its CLIPs, which are made for longer texts than 77.
CLIP_TOKENS = 218
#: Image tokens of the published models' largest picture, by which the pipeline shifts the times of every picture.
LARGEST = 4096


def _given_tokens(inputs: Mapping[str, Any]) -> int:
    """Text tokens that enter a block, from the arguments of ``forward``."""
    return int(inputs["encoder_hidden_states_t5"].shape[1] + 2 * inputs["encoder_hidden_states_llama3"].shape[2])


class HiDream(KLFamily):
    """HiDreamImageTransformer2DModel with AutoencoderKL, two CLIPs, T5 and Llama 3.1; time input 1000 sigma.

    The output is x - noise. Padding of the text is read like the rest. LoRA is on the image's attention alone, not on
    the experts, as in the family's diffusers script.
    """

    name = "hidream"
    pipeline_class = "HiDreamImagePipeline"
    transformer_class = "HiDreamImageTransformer2DModel"
    layout = BlockLayout(
        lists=("double_stream_blocks", "single_stream_blocks"),
        returns={"double_stream_blocks": (IMAGE, TEXT), "single_stream_blocks": (IMAGE,)},
        head="final_layer", order="img_txt", joint_text=_given_tokens,
    )  # fmt: skip
    defaults = Defaults(
        full_resolution=1024, text_length=128, distribution="uniform", shift=3.0, guidance_scale=1.0,
        num_inference_steps=50, preview_guidance=5.0,
    )  # fmt: skip
    text_parts = (
        ("tokenizer", "text_encoder"),
        ("tokenizer_2", "text_encoder_2"),
        ("tokenizer_3", "text_encoder_3"),
        ("tokenizer_4", "text_encoder_4"),
    )
    elsewhere = dict.fromkeys(("tokenizer_4", "text_encoder_4"), "meta-llama/Llama-3.1-8B-Instruct")
    lora_targets = ("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out")
    text_in_blocks = True
    takes_positions = True

    def token_patch(self, transformer_config: Mapping[str, Any]) -> int:
        """2 in the published models."""
        return int(transformer_config["patch_size"])

    def prepare(self, model: Any) -> None:
        """The model's output and its experts are those of evaluation in training too, and pass gradients on."""
        model.register_to_config(force_inference_output=True)
        for module in model.modules():
            if isinstance(module, MOEFeedForwardSwiGLU):
                module.__class__ = RoutedExperts
                module._force_inference_output = module.gate._force_inference_output = True

    def tokenize(self, tokenizers: Mapping[str, Any], prompts: Sequence[str], length: int) -> dict[str, torch.Tensor]:
        """Ids of ``length`` (of the CLIPs at most 218), and the masks ``text_encoder_3_mask``, ``text_encoder_4_mask``.

        Llama's are filled with its end token.
        """
        tokenizers["tokenizer_4"].pad_token = tokenizers["tokenizer_4"].eos_token
        found = {}
        for part, encoder in self.text_parts:
            masked = encoder in ("text_encoder_3", "text_encoder_4")
            longest = min(length, tokenizers[part].model_max_length if masked else CLIP_TOKENS)
            tokens = tokenizers[part](
                list(prompts), padding="max_length", max_length=longest, truncation=True, return_tensors="pt"
            )
            found[encoder] = tokens.input_ids
            if masked:
                found[f"{encoder}_mask"] = tokens.attention_mask
        return found

    def token_counts(self, length: int) -> dict[str, int]:
        """``length``, of the CLIPs at most 218."""
        clips = dict.fromkeys(("text_encoder", "text_encoder_2"), min(length, CLIP_TOKENS))
        others = ("text_encoder_3", "text_encoder_3_mask", "text_encoder_4", "text_encoder_4_mask")
        return clips | dict.fromkeys(others, length)

    def text_places(self, ids: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
        """T5's first, then Llama's twice: its last layer, and that of the block."""
        t5, llama = ids["text_encoder_3"].shape[1], ids["text_encoder_4"].shape[1]
        return {"text_encoder_3": (0,), "text_encoder_4": (t5, t5 + llama)}

    def encode_text(self, encoders: Mapping[str, nn.Module], ids: Mapping[str, torch.Tensor]) -> Text:
        """By encoder: ``<encoder>.pooled`` (B, P) of CLIP, ``<encoder>.embeds`` (B, tokens, D) of T5.

        Of Llama ``<encoder>.embeds`` (B, layers, tokens, D), what leaves each layer; its head over the vocabulary is
        not run.
        """
        found: Text = {}
        encoder: Any
        for name, encoder in encoders.items():
            dtype = encoder.dtype
            if name == "text_encoder_3":
                embeds = encoder(ids[name], attention_mask=ids[f"{name}_mask"])[0]
                found[f"{name}.embeds"] = embeds.to(dtype)
            elif name == "text_encoder_4":
                output = getattr(encoder, "model", encoder)(
                    input_ids=ids[name], attention_mask=ids[f"{name}_mask"], output_hidden_states=True, use_cache=False
                )
                found[f"{name}.embeds"] = torch.stack(output.hidden_states[1:], dim=1).to(dtype)
            else:
                found[f"{name}.pooled"] = encoder(ids[name]).text_embeds.to(dtype)
        return found

    def join_text(self, config: Mapping[str, Any], text: Text, length: int) -> Text:
        """``prompt_embeds`` of T5, ``llama_embeds`` (B, layers, tokens, D), ``pooled_prompt_embeds`` of both CLIPs."""
        return {
            "prompt_embeds": text["text_encoder_3.embeds"],
            "llama_embeds": text["text_encoder_4.embeds"],
            "pooled_prompt_embeds": torch.cat([text["text_encoder.pooled"], text["text_encoder_2.pooled"]], dim=-1),
        }

    def forward_inputs(
        self, config: Mapping[str, Any], latents: torch.Tensor, sigma: torch.Tensor, text: Text, guidance: float
    ) -> dict[str, Any]:
        """Latents as tokens, with positions from 0 on the patch's own grid.

        A picture that is not square is filled as the pipeline fills it where it has the pipeline's size. The pipeline
        draws none that are smaller, and these are not filled: their tokens would be lost in what fills them.
        """
        side = int(config["patch_size"])
        batch, channels, height, width = latents.shape
        rows, columns = height // side, width // side
        tokens = latents.reshape(batch, channels, rows, side, columns, side).permute(0, 2, 4, 3, 5, 1)
        tokens = tokens.reshape(batch, rows * columns, side * side * channels)
        fill = _filling(config, rows, columns)
        ids = F.pad(grid_ids(rows, columns, 3, latents.device), (0, 0, 0, fill))
        return {
            "hidden_states": F.pad(tokens, (0, 0, 0, fill)),
            "hidden_states_masks": F.pad(tokens.new_ones(batch, rows * columns), (0, fill)),
            "img_ids": ids.repeat(batch, 1, 1),
            "img_sizes": [(rows, columns)] * batch,
            "timesteps": sigma * 1000,
            "encoder_hidden_states_t5": text["prompt_embeds"],
            "encoder_hidden_states_llama3": text["llama_embeds"].transpose(0, 1),
            "pooled_embeds": text["pooled_prompt_embeds"],
            "return_dict": False,
        }

    def placed(self, inputs: Mapping[str, Any], positions: torch.Tensor) -> dict[str, Any]:
        """Ids of each sample; what fills a picture keeps zeros."""
        fill = inputs["img_ids"].shape[1] - positions.shape[1]
        return {"img_ids": F.pad(positions, (1, 0, 0, fill))}

    def velocity(self, output: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        """The output with the other sign."""
        return -output

    def set_timesteps(self, scheduler: Any, steps: int, tokens: int, device: torch.device) -> None:
        """The scheduler's own times; where it shifts by the number of tokens, as for the largest picture."""
        shift = {} if isinstance(scheduler, UniPCMultistepScheduler) else {"mu": calculate_shift(LARGEST)}
        scheduler.set_timesteps(steps, device=device, **shift)


def _filling(config: Mapping[str, Any], rows: int, columns: int) -> int:
    """Tokens with which a picture is filled: up to the most that the model is made for, where it nearly has them.

    The pipeline's pictures have those, less what is rounded off their sides: a row and a column more would be too many.
    """
    most = int(config["max_resolution"][0] * config["max_resolution"][1]) // int(config["patch_size"]) ** 2
    nearly = rows * columns <= most < (rows + 1) * (columns + 1)
    return most - rows * columns if nearly and rows != columns else 0


class RoutedExperts(MOEFeedForwardSwiGLU):
    """The model's own experts, whose outputs in evaluation have a gradient.

    Where tokens have no values, as in a plan, every expert gets the same number of them. What the backward pass needs
    does not depend on it: there are as many pairs of token and expert in any case.
    """

    def moe_infer(
        self, x: torch.Tensor, flat_expert_indices: torch.Tensor, flat_expert_weights: torch.Tensor
    ) -> torch.Tensor:
        """The experts' weighted sums (tokens, D) of tokens x (tokens, D).

        Args:
            flat_expert_indices: (tokens * chosen,), the experts of one token after the other.
            flat_expert_weights: (tokens * chosen, 1).
        """
        order = flat_expert_indices.argsort()
        loads = _loads(flat_expert_indices, len(self.experts))
        tokens, weights = order // self.num_activated_experts, flat_expert_weights[order]
        found = []
        parts = zip(self.experts, torch.split(tokens, loads), torch.split(weights, loads), strict=True)
        for expert, own, weight in parts:
            output = expert(x[own])
            found.append((output * weight).to(output.dtype))
        outputs = torch.cat(found)
        return outputs.new_zeros(x.shape).index_add_(0, tokens, outputs)


def _loads(indices: torch.Tensor, experts: int) -> list[int]:
    """How many tokens each expert gets."""
    if isinstance(indices, FakeTensor):
        share, rest = divmod(indices.shape[0], experts)
        return [share + (place < rest) for place in range(experts)]
    loads: list[int] = indices.bincount(minlength=experts).tolist()
    return loads
