"""Every family trains: tensors move and are the pipeline's LoRA; captions of any length, patches of any shape."""

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import nn

from blockskip.adapters.files import DIFFUSERS_KEY, lora_header, save_lora
from blockskip.adapters.lora import adapter_state, load_adapter_state
from blockskip.encoding.text import encode_prompts
from blockskip.families import Text, stack_text
from blockskip.loading.source import ModelSource
from blockskip.loading.transformer import empty_transformer
from blockskip.method.skipping import ConstantResidual, SkippedModel
from blockskip.method.split import Split
from blockskip.precision import compute
from blockskip.store.files import write_atomically
from blockskip.training.step import MicroBatch, training_loss
from tests.families.groups import (
    ALPHA,
    CPU,
    GUIDANCE,
    RANK,
    adapt,
    capture_features,
    distance,
    forward_inputs,
    group,
    layers,
    loss_of,
    stubbed,
    transformer,
    unheard,
)
from tests.method.bases import first
from tests.tiny_families import TINY

FRONT = Split(2, 0)  # exact: what is drawn is what was trained
CAPTIONS = ["dog", " ".join(["a small red fox on a chair by the sea, drawn in ink,"] * 24)[:-1]]
LENGTH = 400


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_four_steps_move_every_tensor_and_the_pipeline_draws_with_them(
    source: ModelSource, tmp_path: Path, dtype: torch.dtype
) -> None:
    full = transformer(source, dtype=dtype)
    count = source.family.layout.count(full)
    skipped = SkippedModel(
        transformer(source, FRONT.skipped(count), dtype), source.family.layout, FRONT, ConstantResidual()
    )
    parameters = adapt(source, skipped.model, FRONT.middle(count), zero=True)
    before = {name: value.detach().clone() for name, value in parameters.items()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2, weight_decay=0.0)
    for seed in range(4):
        batch = group(source, seed=seed)
        with compute(CPU, dtype):
            batch.features = capture_features(source, full, FRONT, batch, dtype=dtype)
            config = source.config("transformer")
            training_loss(skipped, source.family, config, batch, GUIDANCE, dtype).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in parameters.items():
        assert value.dtype == torch.float32
        still = unheard(source.family, skipped.model, FRONT.middle(count), name)
        assert torch.equal(value, before[name]) == still, name

    live = stubbed(source, FRONT)
    adapt(source, live.model, FRONT.middle(count))
    load_adapter_state(live.model, adapter_state(skipped.model))
    names = layers(source, empty_transformer(source), FRONT.middle(count))
    header = {DIFFUSERS_KEY: lora_header(names, RANK, ALPHA)}
    save_lora(tmp_path, adapter_state(skipped.model), header, write_atomically)
    pipeline: Any = getattr(diffusers, source.family.pipeline_class).from_pretrained(source.folder)
    inputs, batch = forward_inputs(source, group(source)), group(source)
    features = capture_features(source, pipeline.transformer, FRONT, batch)
    with torch.no_grad():
        base = first(pipeline.transformer(**inputs))
        TINY[source.family.name].load_lora(pipeline, tmp_path)
        drawn = first(pipeline.transformer(**inputs))
        assert torch.equal(drawn, first(live(features, **inputs)))
    assert distance(drawn, base) > 1e-3


def captioned(source: ModelSource, texts: list[Text], rows: list[int], split: Split, full: nn.Module) -> MicroBatch:
    """Some rows of a group of two, with captions."""
    whole = group(source)
    batch = MicroBatch(
        whole.latents[rows], whole.noise[rows], whole.sigma[rows], torch.ones(len(rows)), stack_text(texts), {}
    )
    batch.features = capture_features(source, full, split, batch)
    return batch


@pytest.mark.parametrize("split", [Split(2, 0), Split(1, 2)], ids=["front", "front and tail"])
def test_captions_of_one_and_of_many_words_train_together_as_alone(source: ModelSource, split: Split) -> None:
    texts = encode_prompts(source, CAPTIONS, LENGTH, torch.float32, CPU)
    full, model = transformer(source), stubbed(source, split)
    adapt(source, model.model, split.middle(model.num_blocks))
    with torch.no_grad():
        together = loss_of(source, model, captioned(source, texts, [0, 1], split, full))
        swapped = loss_of(source, model, captioned(source, texts[::-1], [0, 1], split, full))
        alone = [loss_of(source, model, captioned(source, [texts[row]], [row], split, full)) for row in (0, 1)]
    mean = (alone[0] + alone[1]) / 2
    assert abs(together - mean) < 1e-6 * mean
    assert abs(swapped - mean) > 1e-4 * mean


def test_of_a_text_as_long_as_its_prompt_no_padding_is_stored(
    qwen_image: ModelSource, lumina2: ModelSource, z_image: ModelSource, longcat_image: ModelSource
) -> None:
    """Not in the text's tensors, and not in the features, whose text stream or joint stream has its tokens alone."""
    for source, step in ((qwen_image, 1), (lumina2, 1), (z_image, 32)):  # Z-Image's model fills up to so many itself
        short, long = encode_prompts(source, ["dog", "a dog in the snow, by the sea"], LENGTH, torch.float32, CPU)
        full, tokens = transformer(source), []
        for text in (short, long):
            batch = captioned(source, [text], [0], Split(2, 1), full)
            tokens.append(sum(value.shape[1] for name, value in batch.features.items() if name.startswith("front.")))
        counts = [text["prompt_embeds"].shape[1] for text in (short, long)]
        assert 1 <= counts[0] < counts[1] < LENGTH
        filled = [-(-count // step) * step for count in counts]
        assert tokens[1] - tokens[0] == filled[1] - filled[0] > 0
    padded = encode_prompts(longcat_image, CAPTIONS, LENGTH, torch.float32, CPU)
    assert len({text["prompt_embeds"].shape[1] for text in padded}) == 1  # its image reads the padding


def test_tokens_that_are_only_padding_do_not_matter(sana: ModelSource, qwen_image: ModelSource) -> None:
    for source, mask in ((sana, "prompt_attention_mask"), (qwen_image, "prompt_embeds_mask")):
        model, batch = transformer(source), group(source)
        batch.text = stack_text(encode_prompts(source, CAPTIONS, LENGTH, torch.float32, CPU))
        rest = batch.text[mask] == 0
        assert rest.any() and not rest.all()
        with torch.no_grad():
            expected = model(**forward_inputs(source, batch))[0]
            batch.text["prompt_embeds"] = batch.text["prompt_embeds"].masked_fill(rest[:, :, None], 7.0)
            assert distance(model(**forward_inputs(source, batch))[0], expected) < 1e-6
            batch.text["prompt_embeds"] = batch.text["prompt_embeds"].masked_fill(~rest[:, :, None], 7.0)
            assert distance(model(**forward_inputs(source, batch))[0], expected) > 1e-2


def test_texts_of_one_length_are_stacked_as_they_are_and_others_are_filled() -> None:
    def text(count: int) -> Text:
        return {"tokens": torch.randn(1, count, 3), "pooled": torch.randn(1, 5)}

    same = [text(4), text(4)]
    assert stack_text(same).keys() == {"tokens", "pooled"}
    assert torch.equal(stack_text(same)["tokens"], torch.cat([one["tokens"] for one in same]))
    short, long = text(2), text(4)
    stacked = stack_text([short, long])
    assert stacked["tokens_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert torch.equal(stacked["tokens"][:1, :2], short["tokens"])
    assert not stacked["tokens"][0, 2:].any()
    assert torch.equal(stacked["tokens"][1:], long["tokens"])
    assert stacked["pooled"].shape == (2, 5)


@pytest.mark.parametrize("grid", [(1, 1), (2, 7), (5, 3), (8, 8)], ids=str)
def test_a_patch_may_have_any_size_and_shape(source: ModelSource, grid: tuple[int, int]) -> None:
    batch, full = group(source, grid=grid), transformer(source)
    inputs = forward_inputs(source, batch)
    with torch.no_grad():
        output = source.family.velocity(full(**inputs)[0], batch.latents)
        assert output.shape == batch.latents.shape
        for split, tolerance in ((Split(2, 0), 0.0), (Split(1, 2), 1e-6)):
            skipped = stubbed(source, split)
            adapt(source, skipped.model, split.middle(skipped.num_blocks), zero=True)
            features = capture_features(source, full, split, batch)
            found = source.family.velocity(skipped(features, **inputs)[0], batch.latents)
            assert distance(found, output) <= tolerance
    loss = loss_of(source, skipped, MicroBatch(**(vars(batch) | {"features": features})))
    assert bool(torch.isfinite(loss))
