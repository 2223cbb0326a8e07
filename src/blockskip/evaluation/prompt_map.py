"""How well a picture fits its prompt, and which background it shows, on the built-in models' pictures.

    EfficientNet-Lite0's features (1280) + 4 x 4 colours (48) --ridge--> sentence features (384), 12 backgrounds

Fitted by ``tools/prompt_map.py`` on composites like those that the built-in models were trained on, so it can say
nothing of photographs. MiniLM's features of every prompt of the built-in subjects are in the same file: no text encoder
is needed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from PIL import Image
from safetensors import safe_open

from blockskip import builtin
from blockskip.evaluation.encoder import ImageEncoder, to_pixels

#: Side of the colour thumbnail.
THUMBNAIL = 4


class PromptMap:
    """The two maps.

    Args:
        encoder: gives the features that the maps were fitted on.
    """

    name = "sentence map"

    def __init__(self, encoder: ImageEncoder) -> None:
        self._encoder = encoder
        with safe_open(builtin.prompt_map_path(), framework="pt") as stored:
            self._tensors = {name: stored.get_tensor(name).float() for name in stored.keys()}  # noqa: SIM118
            header = stored.metadata()
        self.sentences: list[str] = json.loads(header["sentences"])
        self.backgrounds: list[str] = json.loads(header["backgrounds"])

    def knows(self, sentence: str) -> bool:
        """Whether pictures can be compared with a sentence."""
        return sentence in self.sentences

    def cosines(self, images: Sequence[Image.Image], sentences: Sequence[str]) -> list[float]:
        """The cosine of each picture with its own sentence, in [-1, 1].

        Raises:
            ValueError: a sentence is not known, or the lists differ in length.
        """
        rows = torch.stack([self._tensors["sentences"][self.sentences.index(sentence)] for sentence in sentences])
        mapped = F.normalize(self._apply("text", images), dim=1)
        if len(mapped) != len(rows):
            raise ValueError(f"{len(mapped)} pictures and {len(rows)} sentences")
        return [float(value) for value in (mapped * F.normalize(rows, dim=1)).sum(1)]

    def background(self, images: Sequence[Image.Image]) -> list[str]:
        """The phrase of the background that each picture shows."""
        return [self.backgrounds[index] for index in self._apply("background", images).argmax(1).tolist()]

    def _apply(self, name: str, images: Sequence[Image.Image]) -> torch.Tensor:
        """(N, K) float32: y = (x - mean) / spread @ weight + offset."""
        pixels = [to_pixels(image) for image in images]
        colours = torch.cat([F.adaptive_avg_pool2d(one, THUMBNAIL).flatten(1) for one in pixels])
        inputs = torch.cat([self._encoder.embed(list(images)), colours], dim=1)
        mean, spread, weight, offset = (self._tensors[f"{name}.{k}"] for k in ("mean", "spread", "weight", "offset"))
        return (inputs - mean) / spread @ weight + offset
