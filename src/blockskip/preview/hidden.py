"""Velocities of a model whose image tokens do not see the text in some blocks, other ones for each picture."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from blockskip.families import Family, Text
from blockskip.method.masking import hidden_text
from blockskip.preview.denoise import Predictor, Streamed

#: Batches that share the reading of a streamed block. While they wait for their turn they hold their states, and a
#: block at work holds more than ten times its batch's state.
TOGETHER = 8


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
        self._hidden = hidden

    def __call__(self, calls: Sequence[tuple[torch.Tensor, torch.Tensor, Text]]) -> list[torch.Tensor]:
        """The velocity of each (latents, sigma, text); the calls of one batch stand together.

        A streamed model is read once for every ``TOGETHER`` batches.
        """
        each = len(calls) // len(self._hidden)
        model = self.model if isinstance(self.model, nn.Module) else self.model.model
        found = []
        for start in range(0, len(self._hidden), TOGETHER):
            rows = RowsInTurn(self._hidden[start : start + TOGETHER], each)
            with hidden_text(model, self.family.layout, rows) as rows.runs:
                found += super().__call__(calls[start * each : (start + TOGETHER) * each])
        return found


class RowsInTurn(Mapping[int, torch.Tensor]):
    """Which rows are masked, bool (B,), by block, in the batch whose turn it is: every block runs batch after batch.

    Args:
        hidden: numbers of blocks, of each row of each batch.
        each: runs of a block for one batch.
    """

    def __init__(self, hidden: Sequence[Sequence[Collection[int]]], each: int) -> None:
        blocks = sorted({block for batch in hidden for row in batch for block in row})
        self._rows = {block: [torch.tensor([block in row for row in batch]) for batch in hidden] for block in blocks}
        self._each = each
        #: By block, how often it has run (``hidden_text`` counts).
        self.runs: Mapping[int, int] = {}

    def __getitem__(self, block: int) -> torch.Tensor:
        return self._rows[block][self.runs[block] // self._each]

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)
