"""Subject fidelity: the mean cosine between drawn pictures and real ones (DreamBooth's protocol, arXiv 2208.12242)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from PIL import Image

from blockskip.evaluation.encoder import Encoder

#: Between floor and ceiling there must be at least this much cosine for a share of it to mean anything.
SMALLEST_SPAN = 0.01


@dataclass(frozen=True)
class Fidelity:
    """Subject fidelity with its scale. All are cosines of image features, in [-1, 1].

    Args:
        value: of the pictures that were judged.
        floor: of the base model's pictures, which has never seen the subject.
        ceiling: of real pictures of the subject among themselves.
    """

    value: float
    floor: float | None = None
    ceiling: float | None = None

    @property
    def share(self) -> float | None:
        """(value - floor) / (ceiling - floor): 0 is the base model, 1 is a real picture; below and above can occur.

        None where an end is unknown or the ceiling is not at least 0.01 above the floor.
        """
        if self.floor is None or self.ceiling is None or not self.ceiling - self.floor >= SMALLEST_SPAN:
            return None
        return (self.value - self.floor) / (self.ceiling - self.floor)


def subject_fidelity(images: list[Image.Image], references: list[Image.Image], encoder: Encoder) -> float:
    """The mean cosine over all pairs of a drawn picture and a reference.

    Args:
        images: drawn pictures of the subject.
        references: real pictures of it that were kept back from the training.
        encoder: gives unit vectors.

    Raises:
        ValueError: one of the lists is empty.
    """
    return float(_cosines(images, references, encoder).mean())


def ceiling(real_a: list[Image.Image], real_b: list[Image.Image], encoder: Encoder) -> float:
    """The mean cosine over all pairs of two real pictures of the subject: what a perfect model would reach.

    A picture is not paired with itself, so the two lists may overlap or be the same.

    Raises:
        ValueError: one of the lists is empty, or no pair of different pictures is left.
    """
    cosines = _cosines(real_a, real_b, encoder)
    different = torch.tensor([[not _same(a, b) for b in real_b] for a in real_a])
    if not different.any():
        raise ValueError("the ceiling needs two different real pictures of the subject")
    return float(cosines[different].mean())


def _cosines(images: list[Image.Image], references: list[Image.Image], encoder: Encoder) -> torch.Tensor:
    if not images or not references:
        raise ValueError("subject fidelity needs at least one picture on either side")
    return encoder.embed(images).double() @ encoder.embed(references).double().T


def _same(a: Image.Image, b: Image.Image) -> bool:
    return a is b or (a.size == b.size and a.convert("RGBA").tobytes() == b.convert("RGBA").tobytes())
