"""Prompts to conditioning tensors: one text encoder in memory at a time, one stored entry a prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from blockskip.families import Family, Text
from blockskip.keys import file_sha256, key
from blockskip.loading.encoders import StreamedEncoder
from blockskip.loading.source import ModelSource
from blockskip.loading.weights import Weights
from blockskip.memory import release
from blockskip.precision import compute
from blockskip.progress import progress
from blockskip.store.groups import GroupStore


@dataclass(frozen=True)
class TextArgument:
    """Everything that a stored prompt depends on; ``transformer`` is its config, which some families join texts by."""

    prompt: str
    length: int
    family: str
    encoders: tuple[str, ...]
    tokenizers: tuple[str, ...]
    transformer: tuple[tuple[str, str], ...]
    dtype: str


def text_keys(
    source: ModelSource, prompts: Sequence[str], length: int, dtype: torch.dtype, device: torch.device
) -> dict[str, str]:
    """The store's key of each prompt."""
    encoders = tuple(Weights(source.part_folder(part)).identity() for _, part in source.text_parts)
    tokenizers = tuple(
        file_sha256(file)
        for part, _ in source.text_parts
        for file in sorted(source.part_folder(part).iterdir())
        if file.is_file()
    )
    config = tuple(sorted((name, repr(value)) for name, value in source.config("transformer").items()))
    argument = (length, source.family.name, encoders, tokenizers, config, f"{dtype} on {device.type}")
    return {prompt: key("text", TextArgument(prompt, *argument)) for prompt in prompts}


def encode_prompts(
    source: ModelSource,
    prompts: Sequence[str],
    length: int,
    dtype: torch.dtype,
    device: torch.device,
    stream: bool = False,
) -> list[Text]:
    """The conditioning tensors of each prompt, each with a batch of one, on the CPU.

    Every prompt is encoded alone, so that its tensors never depend on its neighbours.

    Args:
        stream: hold one layer of an encoder in memory at a time; the tensors are the same bits.
    """
    tokenizers = {part: source.load(part) for part, _ in source.text_parts}
    ids = [source.family.tokenize(tokenizers, [prompt], length) for prompt in prompts]
    found: list[Text] = [{} for _ in prompts]
    with progress(len(prompts) * len(source.text_parts), "encode text") as bar:
        for _, part in source.text_parts:
            streamed = StreamedEncoder(source, part, dtype, device) if stream else None
            encoder = source.load(part, dtype).to(device) if streamed is None else streamed.model
            calls = [partial(_encode, source.family, {part: encoder}, tokens, dtype, device) for tokens in ids]
            results: Iterable[Text] = (call() for call in calls) if streamed is None else streamed.run(calls)
            for text, encoded in zip(found, results, strict=True):
                text |= encoded
                bar.advance()
            del streamed, encoder, calls, results
            release()
    config = source.config("transformer")
    return [source.family.join_text(config, text, length) for text in found]


def _encode(
    family: Family,
    encoders: dict[str, nn.Module],
    ids: dict[str, torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> Text:
    on_device = {name: value.to(device) for name, value in ids.items()}
    with torch.no_grad(), compute(device, dtype):
        encoded = family.encode_text(encoders, on_device)
    return {name: value.to("cpu").contiguous() for name, value in encoded.items()}


def store_prompts(
    source: ModelSource,
    prompts: Sequence[str],
    length: int,
    dtype: torch.dtype,
    device: torch.device,
    store: GroupStore,
    stream: bool = False,
) -> dict[str, str]:
    """Encode the prompts that the store lacks; returns each prompt's key, which does not depend on ``stream``."""
    keys = text_keys(source, prompts, length, dtype, device)
    missing = [prompt for prompt in prompts if not store.has(keys[prompt])]
    if missing:
        for prompt, text in zip(missing, encode_prompts(source, missing, length, dtype, device, stream), strict=True):
            store.write(keys[prompt], text)
    return keys
