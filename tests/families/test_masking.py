"""Hidden text in every family: what the image can no longer know, in which blocks the text counts, and how it is run.

The tiny models are random, so every block reads the text; the controls show it.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import diffusers
import pytest
import torch
from torch import nn

from blockskip.families import Text, stack_text
from blockskip.loading.source import ModelSource
from blockskip.loading.streaming import stream_blocks
from blockskip.loading.transformer import StreamedTransformer
from blockskip.method.attention import AttentionNotSeen, TextsOfSeveralLengths
from blockskip.method.masking import hidden_text, text_attention
from blockskip.precision import compute
from blockskip.preview.denoise import velocity
from blockskip.training.step import MicroBatch
from tests.families.groups import CPU, GUIDANCE, distance, forward_inputs, group, random_text, transformer
from tests.method.bases import Base, first
from tests.method.probing import assert_text_is_hidden, text_tokens, traces
from tests.planted import cut_text
from tests.tiny import randomise
from tests.tiny_families import TINY

PROMPT = "prompt_embeds"
LENGTH = 6


def base_of(source: ModelSource, dtype: torch.dtype = torch.float32) -> Base:
    inputs = forward_inputs(source, group(source), dtype)
    inputs = {
        name: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }
    return Base(transformer(source, dtype=dtype), inputs, source.family.layout)


def every_block(base: Base) -> range:
    return range(base.layout.count(base.model))


def test_no_block_s_image_depends_on_its_text(source: ModelSource) -> None:
    base = base_of(source)
    for index in every_block(base):
        assert_text_is_hidden(base, index)


def test_nor_in_half_precision(source: ModelSource) -> None:
    """In bfloat16 weights, and under autocast as training and previews run."""
    base = base_of(source, torch.bfloat16)
    for index in every_block(base):
        assert_text_is_hidden(base, index)
    base = base_of(source)
    with compute(CPU, torch.bfloat16):
        assert_text_is_hidden(base, 1)


def other_prompt(source: ModelSource, text: Text) -> Text:
    """Other tokens; the pooled vector, which modulates every block, and the mask stay."""
    return text | {PROMPT: random_text(source, text[PROMPT].shape[0], seed=77)[PROMPT]}


def draw(source: ModelSource, model: nn.Module, batch: MicroBatch, hidden: Any) -> torch.Tensor:
    """Latents after four Euler steps from noise."""
    latents, config = batch.noise, source.config("transformer")
    with torch.no_grad(), hidden_text(model, source.family.layout, hidden) as runs:
        for sigma, step in ((1.0, 0.3), (0.7, 0.3), (0.4, 0.3), (0.1, 0.1)):
            sigmas = torch.full((latents.shape[0],), sigma)
            latents = latents - step * velocity(model, source.family, config, latents, sigmas, batch.text, GUIDANCE)
    assert set(runs.values()) <= {4}
    return latents


def test_with_every_block_masked_no_bit_of_a_picture_depends_on_the_prompt(source: ModelSource) -> None:
    base, batch = base_of(source), group(source)
    other = replace(batch, text=other_prompt(source, batch.text))
    every = every_block(base)
    first, second = (draw(source, base.model, own, every) for own in (batch, other))
    assert torch.equal(first, second)
    first, second = (draw(source, base.model, own, []) for own in (batch, other))
    assert distance(first, second) > 1e-2
    first, second = (draw(source, base.model, own, every[1:]) for own in (batch, other))
    assert distance(first, second) > 1e-3


def test_no_gradient_reaches_the_prompt_through_masked_blocks(source: ModelSource) -> None:
    base, names = base_of(source), TINY[source.family.name].inputs

    def gradient(hidden: Sequence[int]) -> torch.Tensor | None:
        latents, prompt = (base.inputs[name] for name in names)
        leaves = [torch.stack(list(value)).requires_grad_() for value in (latents, prompt)]
        given = [leaf if isinstance(latents, torch.Tensor) else list(leaf) for leaf in leaves]
        with hidden_text(base.model, base.layout, hidden):
            first(base.model(**base.inputs | dict(zip(names, given, strict=True)))).square().mean().backward()
        assert leaves[0].grad is not None and leaves[0].grad.any()
        return leaves[1].grad

    hidden, plain = gradient(every_block(base)), gradient([])
    assert hidden is None or not hidden.any()
    assert plain is not None and plain.any()


def test_the_blocks_that_carry_the_text_are_found(source: ModelSource) -> None:
    """Planted in blocks 5 to 7 of eight: masking any other one changes nothing."""
    family, config = source.family, source.config("transformer")
    missing = 8 - family.layout.count(transformer(source))
    cls = getattr(diffusers, family.transformer_class)
    deeper = TINY[family.name].more_blocks(config, missing) if missing else {}
    model = cls.from_config(dict(config, **deeper)).requires_grad_(False)
    family.prepare(model)
    randomise(model, seed=3)
    blocks = family.layout.blocks(model)
    assert len(blocks) == 8
    for block in blocks[:5]:
        cut_text(block, family.layout)
    base = Base(model, forward_inputs(source, group(source)), family.layout)

    def changed(*hidden: int) -> float:
        with torch.no_grad(), hidden_text(model, family.layout, hidden):
            return distance(base.output(), plain)

    with torch.no_grad():
        plain = base.output()
    changes = [changed(index) for index in range(8)]
    assert max(changes[:5]) <= 1e-6
    assert min(changes[5:]) > 1e-2
    assert changed(0, 1, 2, 3, 4) <= 1e-6  # the first n
    assert changed(6, 7) > 1e-2  # the last m


def test_a_sweep_is_one_batch(source: ModelSource) -> None:
    """Every picture of a batch masked in blocks of its own: the first n, the last m, a window, none, all."""
    base = base_of(source)
    count = len(every_block(base))
    sets = [set(), {0}, {0, 1, 2}, {count - 1}, {count - 2, count - 1}, {1, 2}, set(range(count)), set()]
    single = group(source, batch=1)
    expected = [draw(source, base.model, single, blocks) for blocks in sets]

    def repeated(value: torch.Tensor) -> torch.Tensor:
        return value.expand(len(sets), *value.shape[1:]).contiguous()

    text = {name: repeated(value) for name, value in single.text.items()}
    batch = replace(single, noise=repeated(single.noise), text=text)
    rows = {index: torch.tensor([index in blocks for blocks in sets]) for index in range(count)}
    found = draw(source, base.model, batch, rows)
    for row, own in enumerate(expected):
        assert distance(found[row], own[0]) <= 1e-5
    assert min(distance(found[row], expected[0][0]) for row in range(1, 7)) > 1e-3
    plain = draw(source, base.model, batch, {})
    assert distance(found[7], plain[7]) <= 1e-6
    # The same shapes: the same bits.
    assert torch.equal(draw(source, base.model, batch, {1: torch.zeros(len(sets), dtype=torch.bool)}), plain)
    whole = draw(source, base.model, batch, {1: torch.ones(len(sets), dtype=torch.bool)})
    assert torch.equal(whole, draw(source, base.model, batch, [1]))


def test_blocks_streamed_from_files_are_masked_as_resident_ones(source: ModelSource) -> None:
    base = base_of(source)
    count = len(every_block(base))
    hidden = {1: torch.tensor([True, False]), count - 2: torch.tensor([True, True])}
    with torch.no_grad(), hidden_text(base.model, base.layout, hidden):
        expected = base.output()
    streamed = StreamedTransformer(source, torch.float32, CPU)
    with torch.no_grad(), hidden_text(streamed.model, streamed.layout, hidden) as runs:
        for _ in range(2):
            ((_, output, _),) = streamed.run([lambda: base.inputs])
            assert torch.equal(first(output), expected)
    assert runs == {1: 2, count - 2: 2}
    ((_, output, _),) = streamed.run([lambda: base.inputs])
    assert distance(first(output), expected) > 1e-3

    model = transformer(source, range(count))
    stream_blocks(model, source, range(count), torch.float32, CPU)
    with torch.no_grad(), hidden_text(model, base.layout, hidden):
        assert torch.equal(first(model(**base.inputs)), expected)


def test_nothing_stays_behind(source: ModelSource) -> None:
    base = base_of(source)
    with torch.no_grad():
        plain, before = base.output(), traces(base.model)
        with hidden_text(base.model, base.layout, every_block(base)):
            assert not torch.equal(base.output(), plain)
            assert traces(base.model) != before
        with pytest.raises(ZeroDivisionError), hidden_text(base.model, base.layout, [1]):
            raise ZeroDivisionError
        assert traces(base.model) == before
        assert torch.equal(base.output(), plain)


def test_every_family_says_how_its_blocks_read_the_text(source: ModelSource) -> None:
    layout = source.family.layout
    assert (layout.order is None) != (layout.cross is None)


def text_masses(base: Base, blocks: Sequence[int], tokens: torch.Tensor | None) -> dict[int, torch.Tensor]:
    """Of one forward pass, whose output does not change."""
    with torch.no_grad():
        plain = base.output()
        with text_attention(base.model, base.layout, blocks, tokens) as found:
            assert torch.equal(base.output(), plain)
    assert all(len(runs) == 1 for runs in found.values())
    return {index: runs[0] for index, runs in found.items()}


def test_attention_to_text_tokens_is_measured(source: ModelSource) -> None:
    """Parts add up; padding gets nothing where the family masks it; the probabilities are the model's own."""
    base = base_of(source)
    every, chosen = every_block(base), torch.arange(text_tokens(base)) < 2
    some, rest = text_masses(base, every, chosen), text_masses(base, every, ~chosen)
    whole = dict.fromkeys(every, torch.ones(2)) if base.layout.cross else text_masses(base, every, None)
    for index in every:
        assert torch.allclose(some[index] + rest[index], whole[index], atol=1e-6)
        assert float(some[index].min()) > 0.02 and float(some[index].max()) < 0.98
    masked = any("mask" in name for name in group(source).text)
    if masked and not TINY[source.family.name].padding_read:  # ragged: the second row ends one token earlier
        last = text_masses(base, every, torch.arange(LENGTH) == LENGTH - 1)
        assert all(masses[0] > 1e-3 and masses[1] < 1e-6 for masses in last.values())


def test_attention_is_measured_from_the_values_it_gathers(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """With values of one on the text and zero on the image, attention itself gives the mass."""
    base, index = base_of(source), 2
    count, filled = text_tokens(base), TINY[source.family.name].multiple
    image_count = -(-24 // filled) * filled
    keys = count if base.layout.cross else count + image_count
    own = torch.nn.functional.scaled_dot_product_attention
    gathered: list[torch.Tensor] = []

    def gather(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        if key.shape[2] == keys and query.shape[2] >= image_count:
            image_first = base.layout.order == "img_txt"
            text = slice(image_count, None) if image_first else slice(0, count)
            image = slice(0, image_count) if image_first or base.layout.cross else slice(count, None)
            ones = torch.zeros_like(value)
            ones[:, :, text, :] = torch.arange(count)[:, None] < 2
            gathered.append(own(query, key, ones, **options)[:, :, image].mean((1, 2, 3)))
        return own(query, key, value, **options)

    chosen = torch.arange(count) < 2
    found = text_masses(base, [index], chosen)[index]
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", gather)
    with torch.no_grad():
        base.output()
    assert len(gathered) == len(every_block(base))
    assert torch.allclose(found, gathered[index], atol=1e-6)


def test_cross_attention_has_no_mass_elsewhere(sana: ModelSource) -> None:
    base = base_of(sana)
    with pytest.raises(ValueError, match="which of its tokens"), text_attention(base.model, base.layout, [1]):
        pass


def test_an_all_zero_mask_of_text_hides_nothing_from_sana(sana: ModelSource) -> None:
    """A probe built on it would find that no block reads the text."""
    base = base_of(sana)
    zeros = dict(base.inputs, encoder_attention_mask=torch.zeros_like(base.inputs["encoder_attention_mask"]))
    ones = dict(base.inputs, encoder_attention_mask=torch.ones_like(base.inputs["encoder_attention_mask"]))
    changed = zeros | {"encoder_hidden_states": torch.randn_like(base.inputs["encoder_hidden_states"])}
    with torch.no_grad():
        plain, masked, other = (base.model(**inputs)[0] for inputs in (ones, zeros, changed))
        with hidden_text(base.model, base.layout, every_block(base)):
            hidden = base.model(**ones)[0]
    assert distance(masked, plain) < 1e-3
    assert distance(other, masked) > 0.1
    assert distance(hidden, plain) > 0.1


def test_what_cross_attention_leaves_is_zero_with_its_bias(sana: ModelSource) -> None:
    base = base_of(sana)
    left: list[torch.Tensor] = []
    module = base.layout.blocks(base.model)[1].attn2
    handle = module.register_forward_hook(lambda _, args, output: left.append(output))
    with torch.no_grad(), hidden_text(base.model, base.layout, {1: torch.tensor([False, True])}):
        base.output()
    with torch.no_grad(), hidden_text(base.model, base.layout, [1]):
        base.output()
    handle.remove()
    assert module.to_out[0].bias.any()
    assert left[0][0].any() and not left[0][1].any()
    assert not left[1].any()


def test_another_attention_backend_is_told(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cross-attention is replaced whole, whatever computes it; inside joint attention a mask would not be seen."""
    base = base_of(source)

    def other(query: Any, key: Any, value: Any, attn_mask: Any = None, **_: Any) -> torch.Tensor:
        scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
        if attn_mask is not None:
            scores = scores + (attn_mask if attn_mask.dtype != torch.bool else torch.where(attn_mask, 0, -1e9))
        return scores.softmax(-1) @ value

    with torch.no_grad():
        with hidden_text(base.model, base.layout, [1]):
            expected = base.output()
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", other)
        if base.layout.cross:
            with hidden_text(base.model, base.layout, [1]):
                assert distance(base.output(), expected) <= 1e-6
        else:
            with pytest.raises(AttentionNotSeen), hidden_text(base.model, base.layout, [1]):
                base.output()
        tokens = torch.ones(LENGTH, dtype=torch.bool)
        with pytest.raises(AttentionNotSeen), text_attention(base.model, base.layout, [1], tokens):
            base.output()


def test_texts_of_several_lengths_are_refused_where_each_image_follows_its_own(lumina2: ModelSource) -> None:
    batch = group(lumina2)
    short = {name: value[:1, :4] for name, value in batch.text.items()}
    batch.text = stack_text([short, {name: value[1:] for name, value in batch.text.items()}])
    base = Base(transformer(lumina2), forward_inputs(lumina2, batch), lumina2.family.layout)
    with torch.no_grad():
        base.output()
        hiding = hidden_text(base.model, base.layout, [1])
        with pytest.raises(TextsOfSeveralLengths, match=r"in layers\.1 .* of one length"), hiding:
            base.output()
