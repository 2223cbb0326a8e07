"""Velocities of a model whose image tokens do not see the text in some blocks, other ones for each picture."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from blockskip.families import Family, Text
from blockskip.method.masking import hidden_text
from blockskip.preview.denoise import Predictor, Streamed


class HiddenPredictor(Predictor):
    """A predictor under masks: picture j of a batch is drawn with the text hidden in blocks ``hidden[batch][j]``.

    With classifier-free guidance both passes of a step are masked: it is the model that is changed.

    Args:
        hidden: numbers of blocks, of each picture of each batch.
    """

    def __init__(
        self,
        model: nn.Module | Streamed,
        family: Family,
        config: Mapping[str, Any],
        guidance: float,
        hidden: Sequence[Sequence[Collection[int]]],
    ) -> None:
        super().__init__(model, family, config, guidance)
        self._rows = [rows_by_block(batch) for batch in hidden]

    def __call__(self, calls: Sequence[tuple[torch.Tensor, torch.Tensor, Text]]) -> list[torch.Tensor]:
        """The velocity of each (latents, sigma, text); the calls of one batch stand together.

        A streamed model is read once for every batch, since masks of blocks hold for one batch.
        """
        each = len(calls) // len(self._rows)
        model = self.model if isinstance(self.model, nn.Module) else self.model.model
        found = []
        for number, rows in enumerate(self._rows):
            with hidden_text(model, self.family.layout, rows):
                found += super().__call__(calls[number * each : (number + 1) * each])
        return found


def rows_by_block(hidden: Sequence[Collection[int]]) -> dict[int, torch.Tensor]:
    """Which rows of a batch are masked, bool (B,), for every block that is masked in any of them.

    Args:
        hidden: numbers of blocks, of each row.
    """
    return {
        block: torch.tensor([block in row for row in hidden]) for block in sorted({b for row in hidden for b in row})
    }
