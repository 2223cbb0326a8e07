"""The numbers of ids that a plan takes a prompt to have are those that the pipeline's tokenizers give it."""

import pytest

from blockskip.loading.source import ModelSource

LONG = "a photo of sks dog on the beach " * 20


@pytest.mark.parametrize("length", [16, 24])
def test_a_prompt_that_fills_its_length_has_the_counted_ids(source: ModelSource, length: int) -> None:
    tokenizers = {part: source.load(part) for part, _ in source.text_parts}
    ids = source.family.tokenize(tokenizers, [LONG], length)
    assert {name: tuple(value.shape) for name, value in ids.items()} == {
        name: (1, count) for name, count in source.family.token_counts(length).items()
    }


def test_without_t5_the_clips_have_the_counted_ids(sd3_bare: ModelSource) -> None:
    tokenizers = {part: sd3_bare.load(part) for part, _ in sd3_bare.text_parts}
    counts = sd3_bare.family.token_counts(16)
    for name, value in sd3_bare.family.tokenize(tokenizers, [LONG], 16).items():
        assert tuple(value.shape) == (1, counts[name])
