"""DINO and CLIP from folders of the real classes with random weights."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    BertConfig,
    BertModel,
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPTextConfig,
    CLIPVisionConfig,
    ViTConfig,
    ViTImageProcessorPil,
    ViTModel,
)

from blockskip.errors import UserError
from blockskip.evaluation.encoder import ImageEncoder
from blockskip.evaluation.encoders import PUBLISHED, open_encoder

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def dino(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoders") / "dino"
    torch.manual_seed(0)
    ViTModel(ViTConfig(**SMALL, image_size=224, patch_size=16)).save_pretrained(folder)
    ViTImageProcessorPil(size={"height": 224, "width": 224}).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoders") / "clip"
    torch.manual_seed(0)
    vision = CLIPVisionConfig(**SMALL, image_size=224, patch_size=32, projection_dim=24)
    text = CLIPTextConfig(**SMALL, vocab_size=99)
    CLIPModel(
        CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=24)
    ).save_pretrained(folder)
    CLIPImageProcessorPil().save_pretrained(folder)
    return folder


def pictures() -> list[Image.Image]:
    generator = np.random.default_rng(0)
    sizes = ((64, 64), (300, 200), (40, 90))
    return [Image.fromarray(generator.integers(0, 255, (h, w, 3), dtype=np.uint8)) for w, h in sizes]


def test_dino_is_the_class_token_of_the_last_layer(dino: Path) -> None:
    found = open_encoder(str(dino)).embed(pictures())
    inputs = ViTImageProcessorPil.from_pretrained(dino)(pictures(), return_tensors="pt")
    with torch.no_grad():
        state = ViTModel.from_pretrained(dino).eval()(**inputs).last_hidden_state[:, 0]
    assert found.shape == (3, 32) and found.dtype == torch.float32
    torch.testing.assert_close(found, torch.nn.functional.normalize(state, dim=1), atol=1e-6, rtol=0)
    assert abs(float(found[0] @ found[1])) < 0.9999


def test_clip_is_the_projected_picture(clip: Path) -> None:
    found = open_encoder(str(clip)).embed(pictures())
    inputs = CLIPImageProcessorPil.from_pretrained(clip)(pictures(), return_tensors="pt")
    with torch.no_grad():
        embeds = CLIPModel.from_pretrained(clip).eval().get_image_features(**inputs)
    embeds = getattr(embeds, "pooler_output", embeds)
    torch.testing.assert_close(found, torch.nn.functional.normalize(embeds, dim=1), atol=1e-6, rtol=0)


def test_pixels_are_what_pictures_are(dino: Path) -> None:
    encoder = open_encoder(str(dino))
    picture = pictures()[0]
    pixels = torch.from_numpy(np.asarray(picture)).permute(2, 0, 1)[None].float() / 127.5 - 1
    assert torch.equal(encoder.embed(pixels), encoder.embed([picture]))
    with pytest.raises(ValueError, match="no picture"):
        encoder.embed([])


def test_other_weights_in_a_folder_of_the_same_name_have_another_identity(dino: Path, tmp_path: Path) -> None:
    """What is remembered of pictures goes by it."""
    torch.manual_seed(1)
    ViTModel(ViTConfig(**SMALL, image_size=224, patch_size=16)).save_pretrained(tmp_path / "dino")
    shutil.copy(dino / "preprocessor_config.json", tmp_path / "dino")
    shutil.copytree(dino, tmp_path / "copy" / "dino")
    own, other, copy = (
        open_encoder(str(path)).identity for path in (dino, tmp_path / "dino", tmp_path / "copy" / "dino")
    )
    assert own.startswith("dino (") and own == copy != other


def test_names(tmp_path: Path) -> None:
    assert isinstance(open_encoder("efficientnet"), ImageEncoder)
    assert PUBLISHED == {"dino": "facebook/dino-vits16", "clip": "openai/clip-vit-base-patch32"}
    with pytest.raises(UserError, match='encoder "facebook/dino-vits16" is no folder here and cannot be fetched'):
        open_encoder("dino")
    BertModel(BertConfig(**SMALL, vocab_size=50)).save_pretrained(tmp_path / "bert")
    with pytest.raises(UserError, match='is a "bert"; supported are clip'):
        open_encoder(str(tmp_path / "bert"))
