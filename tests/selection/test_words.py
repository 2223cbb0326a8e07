"""The subject's tokens: what a caption names, and where its ids stand among the text that a model's attention sees."""

from typing import Any

import pytest
import torch

from blockskip.encoding.text import encode_prompts
from blockskip.loading.source import ModelSource
from blockskip.loading.transformer import load_transformer
from blockskip.method.layout import IMAGE, TEXT
from blockskip.method.skipping import Stub
from blockskip.selection.words import subject_tokens, subject_words

LENGTH, CPU = 64, torch.device("cpu")


@pytest.mark.parametrize(
    ("caption", "words"),
    [
        ("a photo of sks dog", "sks dog"),
        ("A Photo Of The sks dog.", "sks dog"),
        ("a picture of a bowl of fruit!", "bowl of fruit"),
        ("sks dog", None),
        ("a photo of ", None),
        ("", None),
    ],
)
def test_the_subject_is_what_follows_of(caption: str, words: str | None) -> None:
    assert subject_words(caption) == words


def attended_text(source: ModelSource, prompts: list[str]) -> list[torch.Tensor]:
    """The text tokens (tokens, D) that enter the first block, for each prompt."""
    family, config = source.family, source.config("transformer")
    model = load_transformer(source, [], torch.float32, CPU)
    block, found = family.layout.blocks(model)[0], []
    latents = torch.ones(1, family.latent_channels(source.config("vae")), 4, 4)

    def look(module: Any, args: Any, kwargs: Any) -> None:
        streams = Stub(block, ()).incoming(*args, **kwargs)
        count = family.layout.joint_text(inputs)
        text, joint = streams.get(TEXT), streams[IMAGE][0]
        if text is None:
            assert count is not None
            found.append(joint[:count] if family.layout.order == "txt_img" else joint[-count:])
        else:
            found.append(text[0])

    block.register_forward_pre_hook(look, with_kwargs=True)
    for text in encode_prompts(source, prompts, LENGTH, torch.float32, CPU):
        inputs = family.forward_inputs(config, latents, torch.tensor([0.5]), text, 1.0)
        with torch.no_grad():
            model(**inputs)
    return found


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text encoders whose tokens do not see each other."""
    load = ModelSource.load

    def without_attention(self: ModelSource, part: str, *arguments: Any) -> Any:
        loaded = load(self, part, *arguments)
        if part.startswith("text_encoder"):
            for name, value in loaded.named_parameters():
                if name.endswith(("SelfAttention.o.weight", "o_proj.weight", "out_proj.weight", "out_proj.bias")):
                    torch.nn.init.zeros_(value)
        return loaded

    monkeypatch.setattr(ModelSource, "load", without_attention)


def test_the_tokens_are_those_that_the_subject_s_letters_move(source: ModelSource, apart: None) -> None:
    """In every family: of all text that the blocks get, another letter of the subject moves its own token furthest."""
    tokens = subject_tokens(source, "a photo of sks dog", LENGTH)
    assert tokens is not None
    places = tokens.nonzero().flatten().tolist()
    ends = [place for place in places if place + 1 not in places]
    one, last, before = attended_text(source, ["a photo of sks dog", "a photo of sks doa", "a photo of sks dag"])
    assert int((one - last).norm(dim=-1).argmax()) in ends
    assert int((one - before).norm(dim=-1).argmax()) in [end - 1 for end in ends]
    assert len(places) < 9 * len(ends) and len(ends) == {"sd3": 2, "hidream": 3}.get(source.family.name, 1)


def test_a_subject_that_was_cut_off_or_is_not_named_is_not_found(flux: ModelSource) -> None:
    assert subject_tokens(flux, "a photo of sks dog", 12) is None
    assert subject_tokens(flux, "sks dog", LENGTH) is None
