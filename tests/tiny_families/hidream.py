"""HiDream-I1 in the tests that run for every family: a tiny random pipeline with its four text encoders.

Pixel stride 8 (VAE factor 4, token patch 2), width 32, four experts of which each token takes two. A picture that is
not square is filled to 100 tokens, where the pipeline draws at 64 x 96 pixels: 96 tokens.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, HiDreamImagePipeline, HiDreamImageTransformer2DModel
from transformers import LlamaConfig, LlamaForCausalLM

from blockskip.families import Text
from tests.tiny import clip_tokenizer, kl_autoencoder, narrow_posterior, randomise, t5_encoder, t5_tokenizer
from tests.tiny_families.base import TinyFamily
from tests.tiny_families.qwen_image import qwen_tokenizer
from tests.tiny_families.sd3 import clip_encoder

CLIPS, T5, LLAMA = (12, 20), 24, 16  # widths of the text encoders
LAYERS = 6  # of Llama
#: The side in latent pixels for which a picture of 64 x 96 pixels has the pipeline's area, and a little more.
DRAWN = 19.6


def make_hidream(folder: Path, *, layers: int = 3, single_layers: int = 5, seed: int = 0) -> Path:
    """Write a HiDreamImagePipeline with `layers` double and `single_layers` single blocks; return `folder`."""
    folder = Path(folder)
    tokenizers = [clip_tokenizer(folder / "tokenizer"), clip_tokenizer(folder / "tokenizer_2", pad_token="!")]
    words = qwen_tokenizer([], ("<|begin_of_text|>", "<|eot_id|>"))
    words.eos_token = "<|eot_id|>"
    transformer = HiDreamImageTransformer2DModel(
        patch_size=2,
        in_channels=4,
        num_layers=layers,
        num_single_layers=single_layers,
        attention_head_dim=16,
        num_attention_heads=2,
        caption_channels=[T5, LLAMA],
        text_emb_dim=sum(CLIPS),
        axes_dims_rope=(8, 4, 4),
        max_resolution=(20, 20),
        llama_layers=llama_layers(layers + single_layers),
    )
    vae, t5 = kl_autoencoder(), t5_encoder(t5_tokenizer(), T5)
    clips = [
        clip_encoder(tokenizers[0], CLIPS[0], "quick_gelu", 248),
        clip_encoder(tokenizers[1], CLIPS[1], "gelu", 248),
    ]
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(words),
            hidden_size=LLAMA,
            intermediate_size=2 * LLAMA,
            num_hidden_layers=LAYERS,
            num_attention_heads=2,
            num_key_value_heads=1,
            bos_token_id=None,
            eos_token_id=words.eos_token_id,
        )
    )
    randomise(transformer, vae, *clips, t5, llama, seed=seed)
    narrow_posterior(vae)
    pipeline = HiDreamImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae,
        text_encoder=clips[0],
        tokenizer=tokenizers[0],
        text_encoder_2=clips[1],
        tokenizer_2=tokenizers[1],
        text_encoder_3=t5,
        tokenizer_3=t5_tokenizer(),
        text_encoder_4=llama,
        tokenizer_4=words,
        transformer=transformer,
    )
    pipeline.save_pretrained(folder)
    return folder


def llama_layers(blocks: int) -> list[int]:
    """Which layer of Llama each block gets, as in the published models: one after the other, then the last one."""
    return [min(index, LAYERS - 1) for index in range(blocks)]


def more_blocks(config: Mapping[str, Any], more: int) -> dict[str, Any]:
    """What changes in the transformer's config with some more double blocks."""
    layers = config["num_layers"] + more
    return {"num_layers": layers, "llama_layers": llama_layers(layers + config["num_single_layers"])}


def random_text(config: Mapping[str, Any], batch: int, length: int, generator: torch.Generator) -> Text:
    """Tokens of T5 and of every layer of Llama, and the pooled vectors of both CLIPs."""
    t5, llama = config["caption_channels"]
    shapes = {
        "prompt_embeds": (batch, length, t5),
        "llama_embeds": (batch, LAYERS, length, llama),
        "pooled_prompt_embeds": (batch, config["text_emb_dim"]),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def pipeline_text(pipeline: Any, prompts: Sequence[str], length: int) -> Text:
    """By `HiDreamImagePipeline.encode_prompt`."""
    t5, _, llama, _, pooled, _ = pipeline.encode_prompt(
        list(prompts), do_classifier_free_guidance=False, max_sequence_length=length
    )
    return {"prompt_embeds": t5, "llama_embeds": llama.transpose(0, 1), "pooled_prompt_embeds": pooled}


def small(pipeline: Any) -> None:
    """Let the pipeline, which scales every picture to one area, draw at 64 x 96 pixels."""
    pipeline.default_sample_size = DRAWN


TINY = TinyFamily(
    make_hidream, random_text, pipeline_text, plain={"guidance_scale": 1.0}, guided={"guidance_scale": 3.0},
    rounding=1, inputs=("hidden_states", "encoder_hidden_states_llama3"), ready=small, more_blocks=more_blocks,
)  # fmt: skip
