"""Masks of each picture of each batch, with and without a second pass for guidance, whole and streamed."""

import pytest
import torch

from blockskip.loading.source import ModelSource
from blockskip.loading.transformer import StreamedTransformer
from blockskip.method.masking import hidden_text
from blockskip.preview import hidden as hidden_module
from blockskip.preview.denoise import velocity
from blockskip.preview.hidden import HiddenPredictor
from tests.families.groups import CPU, GUIDANCE, distance, group, random_text, transformer

#: Of each picture of three batches.
HIDDEN = [[(), (0, 1)], [(5,), ()], [(2, 3, 4), (0, 1, 2, 3, 4, 5, 6, 7)]]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("each", [1, 2])
def test_every_picture_is_masked_in_its_own_blocks(
    source: ModelSource, each: int, streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In both passes of a step, where there are two, and in whichever batch of those that share a block."""
    monkeypatch.setattr(hidden_module, "TOGETHER", 2)
    family, config = source.family, source.config("transformer")
    whole, count = transformer(source), family.layout.count(transformer(source))
    hidden = [[tuple(block for block in blocks if block < count) for blocks in batch] for batch in HIDDEN]
    calls = []
    for number in range(len(hidden)):
        batch = group(source, seed=number)
        calls += [(batch.latents, batch.sigma, random_text(source, 2, seed=10 * number + text)) for text in range(each)]
    model = StreamedTransformer(source, torch.float32, CPU) if streamed else whole
    with torch.no_grad():
        found = HiddenPredictor(model, family, config, GUIDANCE, hidden)(calls)
        for place, (call, own) in enumerate(zip(calls, found, strict=True)):
            plain = velocity(whole, family, config, *call, GUIDANCE)
            for row, blocks in enumerate(hidden[place // each]):
                with hidden_text(whole, family.layout, blocks):
                    expected = velocity(whole, family, config, *call, GUIDANCE)
                assert distance(own[row], expected[row]) < 1e-5
                assert not blocks or distance(own[row], plain[row]) > 1e-3
