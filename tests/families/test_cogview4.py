"""CogView4's texts of several lengths: what fills the shorter ones is not read, in memory or block by block."""

import torch

from blockskip.families import stack_text
from blockskip.loading.source import ModelSource
from blockskip.loading.transformer import StreamedTransformer
from tests.families.groups import CPU, distance, forward_inputs, group, random_text, transformer


def test_what_fills_a_shorter_text_is_not_read(cogview4: ModelSource) -> None:
    model, batch = transformer(cogview4), group(cogview4)
    texts = [random_text(cogview4, 1, seed=seed, length=length) for seed, length in ((1, 16), (2, 48))]
    batch.text = stack_text(texts)
    with torch.no_grad():
        together = model(**forward_inputs(cogview4, batch))[0]
        streamed = StreamedTransformer(cogview4, torch.float32, CPU)
        ((_, output, _),) = streamed.run([lambda: forward_inputs(cogview4, batch)])
        assert torch.equal(output[0], together)
        for row, text in enumerate(texts):
            alone = group(cogview4)
            alone.latents, alone.noise, alone.sigma = (
                value[row : row + 1] for value in (batch.latents, batch.noise, batch.sigma)
            )
            alone.text = text
            assert distance(together[row : row + 1], model(**forward_inputs(cogview4, alone))[0]) < 1e-6
        batch.text["prompt_embeds"][0, 16:] = 7.0
        assert distance(model(**forward_inputs(cogview4, batch))[0], together) < 1e-6
        batch.text["prompt_embeds"][0, 15] = 7.0
        assert distance(model(**forward_inputs(cogview4, batch))[0], together) > 1e-3
