"""What pictures are measured with: encoders of subject fidelity, and what tells whether a prompt was followed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from PIL import Image

from blockskip import builtin
from blockskip.benchmark.request import Request
from blockskip.evaluation.clip_text import ClipText
from blockskip.evaluation.encoder import Encoder, ImageEncoder
from blockskip.evaluation.encoders import TransformersEncoder, open_encoder
from blockskip.evaluation.mobilenet import weights_file
from blockskip.evaluation.prompt_map import PromptMap


class PromptScore(Protocol):
    """Anything that compares pictures with sentences."""

    name: str

    def knows(self, sentence: str) -> bool:
        """Whether pictures can be compared with a sentence."""

    def cosines(self, images: Sequence[Image.Image], sentences: Sequence[str]) -> list[float]:
        """The cosine of each picture with its own sentence."""


@dataclass(frozen=True)
class Instruments:
    """All of them.

    Args:
        encoders: of subject fidelity and drift, by name; the first one is the table's, the others are checks.
        prompts: of prompt fidelity, or None.
        backgrounds: tells the backgrounds that the built-in models draw, or None.
    """

    encoders: dict[str, Encoder]
    prompts: PromptScore | None
    backgrounds: PromptMap | None


def encoder_names(request: Request) -> tuple[str, ...]:
    """The encoders that are asked for; where none are, those of the package, the second one if it is installed."""
    if request.encoders:
        return request.encoders
    return ("efficientnet", "mobilenet") if weights_file() is not None else ("efficientnet",)


def open_instruments(request: Request, device: torch.device) -> Instruments:
    """The instruments of a request.

    Raises:
        UserError: one of them cannot be had.
    """
    opened = {name: open_encoder(name, device) for name in encoder_names(request)}
    prompts: PromptScore | None = None
    for name, encoder in opened.items():
        if isinstance(encoder, TransformersEncoder) and encoder.is_clip:
            prompts = ClipText(encoder, name, device)
    own = next((encoder for encoder in opened.values() if isinstance(encoder, ImageEncoder)), None)
    backgrounds = PromptMap(own) if own is not None and drawn_by_us(request) else None
    return Instruments({encoder.name: encoder for encoder in opened.values()}, prompts or backgrounds, backgrounds)


def drawn_by_us(request: Request) -> bool:
    """Whether pictures look like those that the map of prompts was fitted on."""
    return request.model in builtin.MODELS and request.subjects_from is None
