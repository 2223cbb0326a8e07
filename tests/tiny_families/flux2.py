"""FLUX.2 (dev, klein) in the tests that run for every family: tiny random pipelines.

Pixel stride 8 (VAE factor 4, patches of 2x2), width 32. The language models have just the layers that the pipelines
read, in width 8.
"""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
)
from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE
from transformers import (
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from blockskip.families import Text
from tests.tiny import randomise
from tests.tiny_families.base import TinyFamily
from tests.tiny_families.qwen_image import qwen_tokenizer

WIDTH = 8  # of a language model
MISTRAL_TOKENS = ("<s>", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]")
MISTRAL_TEMPLATE = (
    "<s>{% for message in messages %}{% set name = 'SYSTEM_PROMPT' if message.role == 'system' else 'INST' %}"
    "[{{ name }}]{% for part in message.content %}{{ part.text }}{% endfor %}[/{{ name }}]{% endfor %}"
)
QWEN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def make_flux2(folder: Path, *, seed: int = 0) -> Path:
    """Write a Flux2Pipeline like FLUX.2-dev; return `folder`.

    Its tokenizer stands for the published processor, which is a tokenizer when there are no pictures. The instruction
    ahead of every prompt is one token.
    """
    tokenizer = qwen_tokenizer([], (*MISTRAL_TOKENS, SYSTEM_MESSAGE))
    tokenizer.chat_template = MISTRAL_TEMPLATE
    encoder = Mistral3ForConditionalGeneration(
        Mistral3Config(
            text_config={"model_type": "mistral", "head_dim": WIDTH // 2, **_language(len(tokenizer), 31)},
            vision_config={
                "model_type": "pixtral",
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 16,
                "patch_size": 8,
            },
        )
    )
    return _write(Flux2Pipeline, folder, encoder, tokenizer, True, seed)


def make_klein(folder: Path, *, distilled: bool = False, seed: int = 0) -> Path:
    """Write a Flux2KleinPipeline; return `folder`."""
    tokenizer = qwen_tokenizer(["user", "assistant"], ("<|im_start|>", "<|im_end|>", "<think>", "</think>"))
    tokenizer.chat_template = QWEN_TEMPLATE
    encoder = Qwen3ForCausalLM(Qwen3Config(head_dim=WIDTH // 2, **_language(len(tokenizer), 28)))
    pipeline = functools.partial(Flux2KleinPipeline, is_distilled=distilled)
    return _write(pipeline, folder, encoder, tokenizer, False, seed)


def _language(words: int, layers: int) -> dict[str, Any]:
    """What the configs of both language models share."""
    return {
        "vocab_size": words, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": layers,
        "num_attention_heads": 2, "num_key_value_heads": 1, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip


def _write(pipeline: Any, folder: Path, encoder: Any, tokenizer: Any, guidance: bool, seed: int) -> Path:
    transformer = Flux2Transformer2DModel(
        in_channels=16,
        num_layers=3,
        num_single_layers=5,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=3 * WIDTH,
        timestep_guidance_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=guidance,
    )
    vae = AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(8, 16, 16),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=128,
    )
    randomise(transformer, vae, encoder, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    vae.bn.running_mean.copy_(0.1 * torch.randn(16, generator=generator))
    vae.bn.running_var.copy_(0.5 + torch.rand(16, generator=generator))
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    pipeline(scheduler, vae, encoder, tokenizer, transformer).save_pretrained(folder)
    return Path(folder)


def random_text(config: Mapping[str, Any], batch: int, length: int, generator: torch.Generator) -> Text:
    """The language model's tokens."""
    return {"prompt_embeds": torch.randn(batch, length, config["joint_attention_dim"], generator=generator)}


def pipeline_text(pipeline: Any, prompts: Sequence[str], length: int) -> Text:
    """By the pipelines' `encode_prompt`."""
    embeds, _ = pipeline.encode_prompt(list(prompts), max_sequence_length=length)
    return {"prompt_embeds": embeds}


def unpacked(pipeline: Any, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """From the pipeline's tokens of patches."""
    rows, columns = (side // (2 * pipeline.vae_scale_factor) for side in (height, width))
    places = pipeline._prepare_latent_ids(torch.empty(latents.shape[0], 1, rows, columns))
    found: torch.Tensor = pipeline._unpack_latents_with_ids(latents, places)
    return found


TINY = TinyFamily(
    make_flux2, random_text, pipeline_text, plain={"guidance_scale": 2.5}, guided={"guidance_scale": 3.0},
    unpacked=unpacked, mode=True,
)  # fmt: skip
KLEIN = TinyFamily(
    make_klein, random_text, pipeline_text, plain={"guidance_scale": 1.0}, guided={"guidance_scale": 3.0},
    unpacked=unpacked, mode=True,
)  # fmt: skip
