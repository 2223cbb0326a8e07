"""CogView4 in the tests that run for every family: a tiny random pipeline.

Pixel stride 16 (VAE factor 8, as the model is told sizes in pixels, token patch 2), width 32.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import CogView4Pipeline, CogView4Transformer2DModel, FlowMatchEulerDiscreteScheduler
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GlmConfig, GlmModel, PreTrainedTokenizerFast

from blockskip.families import Text
from tests.tiny import kl_autoencoder, narrow_posterior, randomise
from tests.tiny_families.base import TinyFamily


def make_cogview4(folder: Path, *, layers: int = 6, seed: int = 0) -> Path:
    """Write a CogView4Pipeline with `layers` blocks and the scheduler of the published model; return `folder`."""
    folder = Path(folder)
    tokenizer = _tokenizer()
    transformer = CogView4Transformer2DModel(
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=layers,
        attention_head_dim=16,
        num_attention_heads=2,
        text_embed_dim=24,
        time_embed_dim=16,
        condition_dim=8,
        sample_size=16,
        rope_axes_dim=(32, 32),
    )
    vae = kl_autoencoder(levels=4, shift_factor=0.0)
    glm = GlmModel(
        GlmConfig(
            vocab_size=len(tokenizer),
            hidden_size=24,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=12,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    randomise(transformer, vae, glm, seed=seed)
    narrow_posterior(vae)
    scheduler = FlowMatchEulerDiscreteScheduler(
        base_shift=0.25, max_shift=0.75, base_image_seq_len=256, use_dynamic_shifting=True, time_shift_type="linear"
    )
    pipeline = CogView4Pipeline(tokenizer, glm, vae, transformer, scheduler)
    pipeline.save_pretrained(folder)
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    """GLM's byte-level BPE without merges; it puts two tokens ahead of a text and fills on the left."""
    special = ["<|endoftext|>", "[gMASK]", "<sop>"]
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    own = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, []))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    own.post_processor = processors.TemplateProcessing(
        single="[gMASK] <sop> $A", special_tokens=[("[gMASK]", 1), ("<sop>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=own, pad_token=special[0], eos_token=special[0], padding_side="left",
        additional_special_tokens=special[1:],
    )  # fmt: skip


def random_text(config: Mapping[str, Any], batch: int, length: int, generator: torch.Generator) -> Text:
    """GLM's tokens; what fills a text is read like the rest."""
    return {"prompt_embeds": torch.randn(batch, length, config["text_embed_dim"], generator=generator)}


def pipeline_text(pipeline: Any, prompts: Sequence[str], length: int) -> Text:
    """By `CogView4Pipeline.encode_prompt`."""
    return {"prompt_embeds": pipeline.encode_prompt(list(prompts), None, False, max_sequence_length=length)[0]}


TINY = TinyFamily(
    make_cogview4, random_text, pipeline_text, plain={"guidance_scale": 1.0}, guided={"guidance_scale": 3.0},
)  # fmt: skip
