"""Which text tokens are the subject's: "sks dog" in "a photo of sks dog", found by its ids in the prompt's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from blockskip.loading.source import ModelSource
from blockskip.run.fixed import FixedSamples


def subject_words(caption: str) -> str | None:
    """What a caption names after its first "of", without an article and marks at the end; None where it has no "of"."""
    found = re.search(r"\bof\s+(?:(?:an?|the)\s+)?(.*?)[\s.,;:!?]*$", caption, re.IGNORECASE | re.DOTALL)
    return found[1] if found and found[1] else None


def subject_tokens(source: ModelSource, caption: str, length: int) -> torch.Tensor | None:
    """Which tokens of a caption, among the text tokens of the transformer's attention, are its subject's.

    Args:
        length: text tokens, as the caption is encoded with.

    Returns:
        bool (tokens,), up to the last of them; None where the caption does not name its subject as ``subject_words``
        reads it, or the subject's ids are not found in the caption's (it may have been cut off).
    """
    words = subject_words(caption)
    if words is None:
        return None
    tokenizers = {part: source.load(part) for part, _ in source.text_parts}
    ids, parts = source.family.tokenize(tokenizers, [caption], length), {name: part for part, name in source.text_parts}
    found: set[int] = set()
    for encoder, starts in source.family.text_places(ids).items():
        places = _find(ids[encoder][0].tolist(), tokenizers[parts[encoder]], words)
        if not places or min(starts) + places[0] < 0:
            return None
        found |= {start + place for start in starts for place in places}
    tokens = torch.zeros(max(found) + 1, dtype=torch.bool)
    tokens[sorted(found)] = True
    return tokens


def caption_tokens(samples: FixedSamples) -> torch.Tensor:
    """bool (tokens,): the text tokens that are the caption's own, not padding and not those of the empty caption.

    Args:
        samples: all of one caption.
    """
    text, empty = samples.texts[0], samples.empty
    name = next(name for name, value in empty.items() if value.ndim == 3)
    differs = (text[name] != empty[name]).any(-1)[0]
    own = next((value for key, value in text.items() if key.endswith("mask")), None)
    return differs if own is None else differs & own[0].bool()


def _find(row: Sequence[int], tokenizer: Any, words: str) -> list[int]:
    """Places of the ids of some words, the last time they stand together, as the tokenizer has them inside a text."""
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor for text and pictures
    for text in dict.fromkeys((f" {words}", words, f" {words.lower()}", words.lower())):
        wanted = tokenizer(text, add_special_tokens=False).input_ids
        for start in range(len(row) - len(wanted), -1, -1):
            if wanted and row[start : start + len(wanted)] == wanted:
                return list(range(start, start + len(wanted)))
    return []
