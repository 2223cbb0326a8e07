"""Prompts to conditioning tensors: one text encoder in memory at a time, one stored entry a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from blockskip.families import Text
from blockskip.keys import file_sha256, key
from blockskip.loading.source import ModelSource
from blockskip.loading.weights import Weights
from blockskip.memory import release
from blockskip.precision import compute
from blockskip.progress import progress
from blockskip.store.groups import GroupStore


@dataclass(frozen=True)
class TextArgument:
    """Everything that a stored prompt depends on."""

    prompt: str
    length: int
    family: str
    encoders: tuple[str, ...]
    tokenizers: tuple[str, ...]
    dtype: str


def text_keys(
    source: ModelSource, prompts: Sequence[str], length: int, dtype: torch.dtype, device: torch.device
) -> dict[str, str]:
    """The store's key of each prompt."""
    encoders = tuple(Weights(source.part_folder(part)).identity() for _, part in source.family.text_parts)
    tokenizers = tuple(
        file_sha256(file)
        for part, _ in source.family.text_parts
        for file in sorted(source.part_folder(part).iterdir())
        if file.is_file()
    )
    argument = (length, source.family.name, encoders, tokenizers, f"{dtype} on {device.type}")
    return {prompt: key("text", TextArgument(prompt, *argument)) for prompt in prompts}


def encode_prompts(
    source: ModelSource, prompts: Sequence[str], length: int, dtype: torch.dtype, device: torch.device
) -> list[Text]:
    """The conditioning tensors of each prompt, each with a batch of one, on the CPU.

    Every prompt is encoded alone, so that its tensors never depend on its neighbours.
    """
    tokenizers = {part: source.load(part) for part, _ in source.family.text_parts}
    ids = [source.family.tokenize(tokenizers, [prompt], length) for prompt in prompts]
    found: list[Text] = [{} for _ in prompts]
    with progress(len(prompts) * len(source.family.text_parts), "encode text") as bar:
        for _, part in source.family.text_parts:
            encoder = source.load(part, dtype).to(device)
            for text, tokens in zip(found, ids, strict=True):
                on_device = {name: value.to(device) for name, value in tokens.items()}
                with torch.no_grad(), compute(device, dtype):
                    encoded = source.family.encode_text({part: encoder}, on_device)
                text |= {name: value.to("cpu").contiguous() for name, value in encoded.items()}
                bar.advance()
            del encoder
            release()
    return found


def store_prompts(
    source: ModelSource,
    prompts: Sequence[str],
    length: int,
    dtype: torch.dtype,
    device: torch.device,
    store: GroupStore,
) -> dict[str, str]:
    """Encode the prompts that the store lacks; returns each prompt's key."""
    keys = text_keys(source, prompts, length, dtype, device)
    missing = [prompt for prompt in prompts if not store.has(keys[prompt])]
    if missing:
        for prompt, text in zip(missing, encode_prompts(source, missing, length, dtype, device), strict=True):
            store.write(keys[prompt], text)
    return keys
