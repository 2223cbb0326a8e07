"""CLIP-T: the cosine of a picture with its prompt, as CLIP sees both (DreamBooth's protocol, arXiv 2208.12242)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from PIL import Image
from transformers import AutoTokenizer, CLIPTextModelWithProjection

from blockskip.errors import UserError
from blockskip.evaluation.encoders import PUBLISHED, TransformersEncoder


class ClipText:
    """The text side of a CLIP, beside its image side.

    Args:
        images: the image side, opened already.
        path: the same CLIP: ``clip``, a folder or a hub id.

    Raises:
        UserError: the text encoder or its tokenizer is missing.
    """

    name = "CLIP-T"

    def __init__(self, images: TransformersEncoder, path: str, device: torch.device = torch.device("cpu")) -> None:
        self._images, where = images, PUBLISHED.get(path, path)
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(where)
            network = CLIPTextModelWithProjection.from_pretrained(where, dtype=torch.float32)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise UserError(f'the text encoder of "{path}" cannot be had ({reason}).') from None
        self.network = network.to(device).eval().requires_grad_(False)
        self._device = device

    def knows(self, sentence: str) -> bool:
        """Any text can be compared with."""
        return True

    @torch.no_grad()
    def cosines(self, images: Sequence[Image.Image], sentences: Sequence[str]) -> list[float]:
        """The cosine of each picture with its own sentence, in [-1, 1].

        Raises:
            ValueError: the lists differ in length.
        """
        tokens = self._tokenizer(list(sentences), padding=True, truncation=True, max_length=self._length,
                                 return_tensors="pt").to(self._device)  # fmt: skip
        text = F.normalize(self.network(**tokens).text_embeds.float(), dim=1).cpu()
        seen = self._images.embed(list(images))
        if len(seen) != len(text):
            raise ValueError(f"{len(seen)} pictures and {len(text)} sentences")
        return [float(value) for value in (seen * text).sum(1)]

    @property
    def _length(self) -> int:
        return int(self.network.config.max_position_embeddings)
