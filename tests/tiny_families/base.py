"""What the tests that run for every family need to know of one: its tiny pipeline, and how that pipeline is called."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from blockskip.families import Text


def as_it_is(pipeline: Any, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Latents of a pipeline that keeps them as (B, C, h, w)."""
    return latents


def by_the_pipeline(pipeline: Any, folder: Path) -> None:
    """Load LoRA as almost all pipelines do."""
    pipeline.load_lora_weights(folder)


def as_an_option(pipeline: Any, length: int) -> dict[str, Any]:
    """The option of almost all pipelines."""
    return {"max_sequence_length": length}


def as_it_was_loaded(pipeline: Any) -> None:
    """Nothing has to be set."""


def deeper(config: Mapping[str, Any], more: int) -> dict[str, Any]:
    """What changes in a transformer's config with some more blocks in its first list."""
    name = next(name for name in ("num_layers", "n_layers", "num_mmdit_layers") if name in config)
    return {name: config[name] + more}


@dataclass(frozen=True)
class TinyFamily:
    """A family's side of the shared tests. Everything here is the pipeline's, nothing is the family file's own.

    Args:
        make: writes a tiny random pipeline into a folder and returns the folder; six blocks or more.
        random_text: random conditioning tensors of (transformer config, batch, tokens, generator), named and shaped as
            ``encode_text`` gives them; the first row has no padding.
        pipeline_text: the same of (pipeline, prompts, length) by the pipeline's own ``encode_prompt``.
        plain: options of the pipeline's ``__call__`` without which it does not draw as we do, without guidance.
        guided: further options with which it draws with classifier-free guidance of 3, against the usual empty prompt.
        rounding: largest difference of a guided picture's bytes, for pipelines that compute both halves as one batch.
        length: what a call is given for texts of a number of tokens, after (pipeline, number).
        unpacked: (B, C, h, w) of (pipeline, latents as it keeps them, height, width in pixels).
        video: the autoencoder takes and gives frames, (B, C, 1, H, W).
        inputs: names of the latents and of the text among the arguments of the transformer's `forward`.
        multiple: the transformer fills text and image to a multiple of this number of tokens.
        mode: latents are the mode of the autoencoder's distribution, without noise.
        padding_read: the padding of a text is read in spite of its mask.
        deaf: names of LoRA layers that no gradient reaches in the last trained block, where only a stored residual or
            the head follows: they work for text that nobody reads.
        load_lora: lets an adapter in a folder act in the pipeline.
        ready: sets what lets the pipeline draw pictures of 64 x 96 pixels.
        more_blocks: what changes in (transformer config, number) with as many more blocks in the first list.
    """

    make: Callable[[Path], Path]
    random_text: Callable[[Mapping[str, Any], int, int, torch.Generator], Text]
    pipeline_text: Callable[[Any, Sequence[str], int], Text]
    plain: Mapping[str, Any] = field(default_factory=dict)
    guided: Mapping[str, Any] = field(default_factory=dict)
    rounding: int = 0
    length: Callable[[Any, int], dict[str, Any]] = as_an_option
    unpacked: Callable[[Any, torch.Tensor, int, int], torch.Tensor] = as_it_is
    video: bool = False
    inputs: tuple[str, str] = ("hidden_states", "encoder_hidden_states")
    multiple: int = 1
    mode: bool = False
    padding_read: bool = False
    deaf: tuple[str, ...] = ()
    load_lora: Callable[[Any, Path], None] = by_the_pipeline
    ready: Callable[[Any], None] = as_it_was_loaded
    more_blocks: Callable[[Mapping[str, Any], int], dict[str, Any]] = deeper


def ragged_mask(batch: int, length: int) -> torch.Tensor:
    """(B, length) int64: rows end one and two tokens earlier in turn; the first one is whole."""
    mask = torch.ones(batch, length, dtype=torch.int64)
    for index in range(batch):
        mask[index, length - index % 3 :] = 0
    return mask
