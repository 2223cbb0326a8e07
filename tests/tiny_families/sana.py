"""SANA in the tests that run for every family; its tiny pipeline is that of `tests.tiny`."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from blockskip.families import Text
from tests.tiny import make_sana
from tests.tiny_families.base import TinyFamily, ragged_mask


def random_text(config: Mapping[str, Any], batch: int, length: int, generator: torch.Generator) -> Text:
    """Gemma's tokens and a ragged mask."""
    embeds = torch.randn(batch, length, config["caption_channels"], generator=generator)
    return {"prompt_embeds": embeds, "prompt_attention_mask": ragged_mask(batch, length)}


def pipeline_text(pipeline: Any, prompts: Sequence[str], length: int) -> Text:
    """By `SanaPipeline.encode_prompt`, without its instruction."""
    embeds, mask, _, _ = pipeline.encode_prompt(list(prompts), False, max_sequence_length=length)
    return {"prompt_embeds": embeds, "prompt_attention_mask": mask}


TINY = TinyFamily(
    make_sana, random_text, pipeline_text,
    plain={"complex_human_instruction": None, "use_resolution_binning": False, "guidance_scale": 1.0},
    guided={"guidance_scale": 3.0}, rounding=1,
)  # fmt: skip
