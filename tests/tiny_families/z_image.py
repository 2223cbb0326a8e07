"""Z-Image in the tests that run for every family: a tiny random pipeline.

Pixel stride 8 (VAE factor 4, token patch 2), width 32.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3Config, Qwen3Model

from blockskip.families import Text
from tests.tiny import kl_autoencoder, narrow_posterior, randomise
from tests.tiny_families.base import TinyFamily
from tests.tiny_families.flux2 import QWEN_TEMPLATE
from tests.tiny_families.qwen_image import qwen_tokenizer

WIDTH = 24  # of the language model


def make_z_image(folder: Path, *, layers: int = 8, seed: int = 0) -> Path:
    """Write a ZImagePipeline with `layers` blocks; return `folder`."""
    tokenizer = qwen_tokenizer(["user", "assistant"])
    tokenizer.chat_template = QWEN_TEMPLATE
    transformer = ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=layers,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=WIDTH,
        axes_dims=[4, 6, 6],
        axes_lens=[512, 64, 64],
    )
    encoder = Qwen3Model(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=WIDTH // 2,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    vae = kl_autoencoder()
    randomise(transformer, vae, encoder, seed=seed)
    narrow_posterior(vae)
    pipeline = ZImagePipeline(FlowMatchEulerDiscreteScheduler(shift=3.0), vae, encoder, tokenizer, transformer)
    pipeline.save_pretrained(folder)
    return Path(folder)


def random_text(config: Mapping[str, Any], batch: int, length: int, generator: torch.Generator) -> Text:
    """The language model's tokens, without padding."""
    return {"prompt_embeds": torch.randn(batch, length, config["cap_feat_dim"], generator=generator)}


def pipeline_text(pipeline: Any, prompts: Sequence[str], length: int) -> Text:
    """By `ZImagePipeline.encode_prompt`, which gives a list; zeros in the place of what others have more."""
    texts, _ = pipeline.encode_prompt(list(prompts), do_classifier_free_guidance=False, max_sequence_length=length)
    embeds = pad_sequence(texts, batch_first=True)
    counts = torch.tensor([len(text) for text in texts])
    mask = (torch.arange(embeds.shape[1]) < counts[:, None]).long()
    return {"prompt_embeds": embeds} | ({} if bool(mask.all()) else {"prompt_embeds_mask": mask})


TINY = TinyFamily(
    make_z_image, random_text, pipeline_text, plain={"guidance_scale": 0.0}, guided={"guidance_scale": 3.0},
    rounding=1, inputs=("x", "cap_feats"), multiple=32, mode=True,
)  # fmt: skip
