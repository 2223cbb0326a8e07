"""Chroma's mask under gradient checkpointing, and Z-Image's samples one by one."""

from typing import Any

import pytest
import torch

from blockskip.families import stack_text
from blockskip.loading.source import ModelSource
from blockskip.method.attention import TextsOfSeveralLengths
from blockskip.method.masking import hidden_text
from tests.families.groups import adapt, distance, forward_inputs, group, layers, transformer


def gradients(source: ModelSource, checkpointing: bool, own: bool = False) -> dict[str, torch.Tensor]:
    """Of LoRA in every block of the whole model; with the model's own checkpointing if `own`."""
    model: Any = transformer(source)
    parameters = adapt(source, model, range(source.family.layout.count(model)))
    if own:
        model.enable_gradient_checkpointing()
    elif checkpointing:
        source.family.enable_checkpointing(model)
    model.train()
    model(**forward_inputs(source, group(source)))[0].square().mean().backward()
    return {name: value.grad for name, value in parameters.items() if value.grad is not None}


def test_checkpointing_leaves_chroma_s_gradients_as_they_are(chroma: ModelSource) -> None:
    plain, found, lost = gradients(chroma, False), gradients(chroma, True), gradients(chroma, True, own=True)
    names = layers(chroma, transformer(chroma), range(8))
    assert len(plain) > len(names)
    for name, value in plain.items():
        assert torch.equal(found[name], value), name
    single = next(name for name in plain if name.startswith("single_transformer_blocks"))
    assert distance(lost[single], plain[single]) > 1e-3  # the model's own: the reason for ours


def test_texts_of_several_lengths_go_to_z_image_without_their_padding(z_image: ModelSource) -> None:
    model, batch = transformer(z_image), group(z_image)
    rows = batch.text["prompt_embeds"]
    texts = [{"prompt_embeds": rows[:1, :2]}, {"prompt_embeds": torch.cat([rows] * 6, dim=1)[1:]}]
    batch.text = stack_text(texts)
    inputs = forward_inputs(z_image, batch)
    assert [len(text) for text in inputs["cap_feats"]] == [2, 36]
    with torch.no_grad():
        together = model(**inputs)[0]
        for row, text in enumerate(texts):
            one = (
                inputs
                | {name: inputs[name][row : row + 1] for name in ("x", "t")}
                | {"cap_feats": [text["prompt_embeds"][0]]}
            )
            assert distance(model(**one)[0][0], together[row]) < 1e-6
        with (
            pytest.raises(TextsOfSeveralLengths),
            hidden_text(model, z_image.family.layout, [1]),
        ):
            model(**inputs)
