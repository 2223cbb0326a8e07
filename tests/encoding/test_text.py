"""Prompts: what is stored is what the model's own pipeline makes of them, whatever they are encoded with."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline, SanaPipeline

from blockskip.encoding.text import encode_prompts, store_prompts, text_keys
from blockskip.families import Text
from blockskip.loading.source import ModelSource
from blockskip.store.groups import GroupStore

CPU = torch.device("cpu")
LENGTH = 12
PROMPTS = ["a photo of sks dog", "", "Ein Hündchen, 犬 und mehr", "word " * 40, " A  dog ", "on the beach"]


def encode(source: ModelSource, prompts: list[str], length: int = LENGTH) -> list[Text]:
    return encode_prompts(source, prompts, length, torch.float32, CPU)


def equal(one: Text, other: Text) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@torch.no_grad()
def by_pipeline(source: ModelSource, prompt: str) -> Text:
    if source.family.name == "flux":
        flux: Any = FluxPipeline.from_pretrained(source.folder)
        embeds, pooled, _ = flux.encode_prompt(prompt, None, max_sequence_length=LENGTH)
        return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}
    sana: Any = SanaPipeline.from_pretrained(source.folder)
    embeds, mask, _, _ = sana.encode_prompt(
        prompt, do_classifier_free_guidance=False, max_sequence_length=LENGTH, complex_human_instruction=None
    )
    return {"prompt_embeds": embeds, "prompt_attention_mask": mask}


@pytest.mark.parametrize("prompt", PROMPTS)
def test_as_the_pipeline_does(source: ModelSource, prompt: str) -> None:
    (text,) = encode(source, [prompt])
    assert equal(text, by_pipeline(source, prompt))
    assert text["prompt_embeds"].shape[:2] == (1, LENGTH)


def test_neighbours_do_not_matter(source: ModelSource) -> None:
    """Each prompt is encoded alone: its tensors are the same bits in any company and order."""
    together = encode(source, PROMPTS)
    assert all(map(equal, together, encode(source, PROMPTS[::-1])[::-1]))
    assert equal(together[3], encode(source, [PROMPTS[3]])[0])
    texts = [tuple(text["prompt_embeds"].flatten().tolist()) for text in together]
    assert len(set(texts)) == len(PROMPTS)
    assert not any(value.requires_grad for text in together for value in text.values())


def test_the_length_is_the_one_that_is_asked_for(source: ModelSource) -> None:
    for length in (1, 5, 20):
        (text,) = encode(source, ["a dog"], length)
        assert text["prompt_embeds"].shape[1] == length


def test_the_store_has_each_prompt_once(source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = GroupStore(tmp_path)
    keys = store_prompts(source, ["a dog", "a cat"], LENGTH, torch.float32, CPU, store)
    assert list(keys) == ["a dog", "a cat"]
    for prompt, name in keys.items():
        assert equal(store.read(name), encode(source, [prompt])[0])
    encoded: list[list[str]] = []
    original = encode_prompts

    def spy(source: ModelSource, prompts: list[str], *args: Any) -> list[Text]:
        encoded.append(list(prompts))
        return original(source, prompts, *args)

    monkeypatch.setattr("blockskip.encoding.text.encode_prompts", spy)
    more = store_prompts(source, ["a cat", "", "a dog"], LENGTH, torch.float32, CPU, store)
    assert encoded == [[""]]
    assert {prompt: more[prompt] for prompt in keys} == keys
    store_prompts(source, ["a cat", "", "a dog"], LENGTH, torch.float32, CPU, GroupStore(tmp_path))
    assert encoded == [[""]]


def test_keys_follow_what_the_text_depends_on(source: ModelSource, flux: ModelSource, sana: ModelSource) -> None:
    def one(
        prompt: str = "a dog", length: int = LENGTH, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> str:
        return text_keys(source, [prompt], length, dtype, torch.device(device))[prompt]

    other = sana if source is flux else flux
    found = [one(), one("a dog "), one("A dog"), one(length=LENGTH + 1), one(dtype=torch.bfloat16)]
    found += [one(device="cuda"), text_keys(other, ["a dog"], LENGTH, torch.float32, CPU)["a dog"]]
    assert len(set(found)) == len(found)
    assert text_keys(source, ["x", "a dog"], LENGTH, torch.float32, CPU)["a dog"] == one()
