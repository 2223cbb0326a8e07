"""CLIP-T on a folder of the real classes with random weights, and the published protocol through the benchmark."""

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoTokenizer,
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPTextConfig,
    CLIPVisionConfig,
    ViTConfig,
    ViTImageProcessorPil,
    ViTModel,
)

from blockskip.benchmark import measures
from blockskip.benchmark.instruments import open_instruments
from blockskip.benchmark.request import Request
from blockskip.benchmark.subjects import builtin_subject
from blockskip.errors import UserError
from blockskip.evaluation import encoders
from blockskip.evaluation.clip_text import ClipText
from blockskip.evaluation.encoders import TransformersEncoder
from tests.evaluation.pictures import ball, grass, stripes
from tests.tiny import clip_tokenizer

SMALL: dict[str, int] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoders") / "clip"
    torch.manual_seed(0)
    words = clip_tokenizer(folder)
    text = CLIPTextConfig(
        **SMALL,
        vocab_size=len(words),
        eos_token_id=words.eos_token_id,
        bos_token_id=words.bos_token_id,
        projection_dim=24,
    )
    vision = CLIPVisionConfig(**SMALL, image_size=224, patch_size=32, projection_dim=24)
    CLIPModel(
        CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=24)
    ).save_pretrained(folder)
    CLIPImageProcessorPil().save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def dino(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoders") / "dino"
    torch.manual_seed(1)
    ViTModel(ViTConfig(**SMALL, image_size=224, patch_size=16)).save_pretrained(folder)
    ViTImageProcessorPil(size={"height": 224, "width": 224}).save_pretrained(folder)
    return folder


def test_it_is_the_cosine_of_clips_two_sides(clip: Path) -> None:
    pictures, sentences = [ball(1), grass(1)], ["a ball", "green grass in the wind"]
    found = ClipText(TransformersEncoder(str(clip)), str(clip)).cosines(pictures, sentences)
    model, tokens = CLIPModel.from_pretrained(clip).eval(), AutoTokenizer.from_pretrained(clip)
    pixels = CLIPImageProcessorPil.from_pretrained(clip)(pictures, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        output = model(**tokens(sentences, padding=True, return_tensors="pt"), pixel_values=pixels)
    expected = (output.image_embeds * output.text_embeds).sum(1)
    assert torch.allclose(torch.tensor(found), expected, atol=1e-5)
    swapped = ClipText(TransformersEncoder(str(clip)), str(clip)).cosines(pictures, sentences[::-1])
    assert not torch.allclose(torch.tensor(swapped), torch.tensor(found), atol=1e-4)


def test_a_long_prompt_is_cut_where_the_model_ends(clip: Path) -> None:
    score = ClipText(TransformersEncoder(str(clip)), str(clip))
    assert score.knows("anything") and len(score.cosines([ball(1)], ["word " * 300])) == 1
    with pytest.raises(ValueError, match="1 pictures and 2 sentences"):
        score.cosines([ball(1)], ["a", "b"])


def test_without_its_text_side_it_is_told(clip: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the text encoder of"):
        ClipText(TransformersEncoder(str(clip)), str(tmp_path / "nothing"))


def test_the_published_protocol_measures_with_dino_and_clip(
    clip: Path, dino: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoders, "PUBLISHED", {"dino": str(dino), "clip": str(clip)})
    monkeypatch.setattr("blockskip.evaluation.clip_text.PUBLISHED", {"clip": str(clip)})
    found = open_instruments(Request(encoders=("dino", "clip")), torch.device("cpu"))
    assert list(found.encoders) == ["dino", "clip"] and found.backgrounds is None
    subject = builtin_subject("owl")
    rows = [[ball(number)] for number in range(len(subject.prompts))]
    references = {"real": [ball(11), stripes(1)]}
    values = measures.fidelity(rows, references, found)
    own = TransformersEncoder(str(dino))
    expected = (own.embed([ball(0)]).double() @ own.embed(references["real"]).double().T).mean()
    assert values["dino"]["real"][0] == pytest.approx(float(expected), abs=1e-6)
    assert len(values["clip"]["real"]) == len(subject.prompts)
    said = measures.prompt_fidelity(rows, subject.prompts, found)
    score = ClipText(TransformersEncoder(str(clip)), str(clip))
    assert said == pytest.approx(score.cosines([row[0] for row in rows], [item.said for item in subject.prompts]))
