"""Prompts: what is stored is what the model's own pipeline makes of them, whatever they are encoded with."""

import gc
import shutil
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from blockskip.encoding.text import encode_prompts, store_prompts, text_keys
from blockskip.families import Text
from blockskip.loading.ahead import Expecting
from blockskip.loading.encoders import StreamedEncoder, layer_names, stored_layers
from blockskip.loading.source import ModelSource, open_model
from blockskip.loading.weights import Weights
from blockskip.store.groups import GroupStore
from tests.families.groups import distance
from tests.tiny_families import TINY

CPU = torch.device("cpu")
LENGTH = 48
LONG = "word " * 40
PROMPTS = ["a photo of sks dog", "", "Ein Hündchen, 犬 und mehr", LONG, " A  dog ", "on the beach"]


def encode(source: ModelSource, prompts: list[str], length: int = LENGTH) -> list[Text]:
    return encode_prompts(source, prompts, length, torch.float32, CPU)


def equal(one: Text, other: Text) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def pipeline(source: ModelSource) -> Any:
    """The family's own pipeline, without a part that text does not need."""
    cls = getattr(diffusers, source.family.pipeline_class)
    return cls.from_pretrained(source.folder, scheduler=None)


@torch.no_grad()
def by_pipeline(source: ModelSource, pipeline: Any, prompt: str, length: int = LENGTH) -> Text:
    return TINY[source.family.name].pipeline_text(pipeline, [prompt], length)


def test_as_the_pipeline_does(source: ModelSource, pipeline: Any) -> None:
    for prompt in PROMPTS:
        (text,) = encode(source, [prompt])
        expected = by_pipeline(source, pipeline, prompt)
        assert text.keys() == expected.keys()
        for name, value in text.items():
            # Where a pipeline cuts after encoding, the tokens before the cut have been computed beside others.
            assert torch.equal(value, expected[name]) or (prompt == LONG and distance(value, expected[name]) < 1e-6)


def test_neighbours_do_not_matter(source: ModelSource) -> None:
    """Each prompt is encoded alone: its tensors are the same bits in any company and order."""
    together = encode(source, PROMPTS)
    assert all(map(equal, together, encode(source, PROMPTS[::-1])[::-1]))
    assert equal(together[3], encode(source, [PROMPTS[3]])[0])
    texts = [tuple(text["prompt_embeds"].flatten().tolist()) for text in together]
    assert len(set(texts)) == len(PROMPTS)
    assert not any(value.requires_grad for text in together for value in text.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_streamed_encoders_give_the_same_bits(
    source: ModelSource, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = encode_prompts(source, PROMPTS, LENGTH, dtype, CPU)
    read: list[str] = []
    fill = StreamedEncoder._fill
    monkeypatch.setattr(StreamedEncoder, "_fill", lambda encoder, name: read.append(name) or fill(encoder, name))
    streamed = encode_prompts(source, PROMPTS, LENGTH, dtype, CPU, stream=True)
    assert all(map(equal, streamed, expected))
    several = list(read)
    read.clear()
    assert all(map(equal, encode_prompts(source, PROMPTS[:1], LENGTH, dtype, CPU, True), expected[:1]))
    assert len(read) >= 2 * len(source.text_parts)  # layers
    assert len(several) == 2 * len(read)  # these prompts are too many to go together at once


def test_the_files_tensors_of_each_layer_are_found(source: ModelSource) -> None:
    """Whatever the files call them: what is fetched before a layer's turn is that layer, and all of it."""
    for _, part in source.text_parts:
        whole, files = source.load(part, torch.float32), Weights(source.part_folder(part))
        layers = layer_names(whole)
        stored = stored_layers(layers, files.files)
        for layer in layers:
            expected = Counter(value.numpy().tobytes() for value in whole.get_submodule(layer).state_dict().values())
            found = Counter(value.numpy().tobytes() for value in files.read(stored[layer]).values())
            assert found == expected, (part, layer)
        assert len({name for names in stored.values() for name in names}) == sum(map(len, stored.values())) > 0


def test_the_next_layer_is_asked_for_while_one_is_used(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(Expecting, "soon", lambda _, names: asked.append(list(names)))
    encode_prompts(source, PROMPTS[:1], LENGTH, torch.float32, CPU, True)
    assert len(asked) >= len(source.text_parts)
    assert all(asked)


def test_the_thread_that_fetches_layers_ends_with_them(sana: ModelSource) -> None:
    gc.collect()
    before = {thread for thread in threading.enumerate() if thread.name.startswith("blockskip-fetch")}
    encode_prompts(sana, PROMPTS[:1], LENGTH, torch.float32, CPU, True)
    gc.collect()
    begun = {thread for thread in threading.enumerate() if thread.name.startswith("blockskip-fetch")} - before
    for thread in begun:
        thread.join(timeout=10)
        assert not thread.is_alive()


def test_what_is_streamed_is_stored_under_the_same_key(source: ModelSource, tmp_path: Path) -> None:
    store = GroupStore(tmp_path)
    keys = store_prompts(source, PROMPTS, LENGTH, torch.float32, CPU, store, stream=True)
    assert keys == text_keys(source, PROMPTS, LENGTH, torch.float32, CPU)
    for prompt, text in zip(PROMPTS, encode(source, PROMPTS), strict=True):
        assert equal(store.read(keys[prompt]), text)


def test_the_length_is_the_one_that_is_asked_for(source: ModelSource, pipeline: Any) -> None:
    prompt, asked = "a dog on the beach at night, seen from above", (4, 20, 40)
    lengths = [encode(source, [prompt], length)[0]["prompt_embeds"].shape[1] for length in asked]
    assert lengths[0] < lengths[1] < lengths[2]
    for found, length in zip(lengths, asked, strict=True):
        assert found == by_pipeline(source, pipeline, prompt, length)["prompt_embeds"].shape[1]


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


def test_text_without_t5_is_as_wide_as_its_transformer_and_its_key_says_so(
    sd3_bare: ModelSource, tmp_path: Path
) -> None:
    wider = open_model(str(shutil.copytree(sd3_bare.folder, tmp_path / "model")))
    path = wider.folder / "transformer" / "config.json"
    path.write_text(path.read_text(encoding="utf-8").replace('dim": 40', 'dim": 48'), encoding="utf-8")
    for model, width in ((sd3_bare, 40), (wider, 48)):
        (text,) = encode(model, ["a dog"])
        assert text["prompt_embeds"].shape == (1, 77 + LENGTH, width)
        assert not text["prompt_embeds"][:, 77:].any()
    keys = [text_keys(model, ["a dog"], LENGTH, torch.float32, CPU)["a dog"] for model in (sd3_bare, wider)]
    assert keys[0] != keys[1]
