"""EfficientNet-Lite0 (Tan & Le 2019, the Lite variant): the small network that judges pictures.

    224 px -> stem /2 -> 16 inverted bottlenecks /16 -> head 1280 x 7 x 7 -> mean = features (1280) -> classifier (1000)

Lite means: ReLU6 everywhere, no squeeze-and-excitation. Padding is TensorFlow's "SAME": at stride 2 one more row and
column of zeros lies at the bottom right than at the top left.
"""

from __future__ import annotations

import re

import torch
import torch.nn.functional as F
from torch import nn

#: (repeats, kernel, stride of the first, expansion, output channels) of the seven stages.
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
STEM_CHANNELS, FEATURES, CLASSES = 32, 1280, 1000


class ConvNorm(nn.Module):
    """Convolution with "SAME" padding, batch norm and, unless linear, ReLU6."""

    def __init__(
        self, channels: int, out: int, kernel: int = 1, stride: int = 1, groups: int = 1, linear: bool = False
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out, kernel, stride, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(out, eps=1e-3)
        self.linear = linear
        before = (kernel - stride) // 2
        after = kernel - stride - before
        self.padding = (before, after, before, after) if kernel > 1 else (0, 0, 0, 0)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states = self.norm(self.conv(F.pad(hidden_states, self.padding)))
        return hidden_states if self.linear else F.relu6(hidden_states)


class Bottleneck(nn.Module):
    """Widen, filter each channel, narrow; added to the input where the shapes agree."""

    def __init__(self, channels: int, out: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = channels * expansion
        self.expand = ConvNorm(channels, wide) if expansion > 1 else nn.Identity()
        self.depthwise = ConvNorm(wide, wide, kernel, stride, groups=wide)
        self.project = ConvNorm(wide, out, linear=True)
        self.residual = stride == 1 and channels == out

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        result = self.project(self.depthwise(self.expand(hidden_states)))
        return hidden_states + result if self.residual else result


class EfficientNetLite0(nn.Module):
    """The network, 4.65 M parameters. ``features`` is what pictures are compared by."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvNorm(3, STEM_CHANNELS, 3, 2)
        blocks, channels = [], STEM_CHANNELS
        for repeats, kernel, stride, expansion, out in STAGES:
            for index in range(repeats):
                blocks.append(Bottleneck(channels, out, kernel, stride if index == 0 else 1, expansion))
                channels = out
        self.blocks = nn.Sequential(*blocks)
        self.head = ConvNorm(channels, FEATURES)
        self.classifier = nn.Linear(FEATURES, CLASSES)

    def features(self, pixels: torch.Tensor) -> torch.Tensor:
        """(B, 1280) features of normalised pixels (B, 3, 224, 224)."""
        return self.head(self.blocks(self.stem(pixels))).mean(dim=(2, 3))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """(B, 1000) ImageNet logits of normalised pixels (B, 3, 224, 224)."""
        return self.classifier(self.features(pixels))


def rename(name: str) -> str:
    """The name in this network of a tensor of the published file.

    >>> rename("_blocks.3._bn0.weight")
    'blocks.3.expand.norm.weight'
    """
    inside = {
        "_expand_conv": "expand.conv",
        "_bn0": "expand.norm",
        "_depthwise_conv": "depthwise.conv",
        "_bn1": "depthwise.norm",
        "_project_conv": "project.conv",
        "_bn2": "project.norm",
    }
    outside = {
        "_conv_stem": "stem.conv",
        "_bn0": "stem.norm",
        "_conv_head": "head.conv",
        "_bn1": "head.norm",
        "_fc": "classifier",
    }
    if match := re.fullmatch(r"_blocks\.(\d+)\.(\w+)\.(\w+)", name):
        index, module, tensor = match.groups()
        return f"blocks.{index}.{inside.get(module, module)}.{tensor}"
    module, _, tensor = name.partition(".")
    return f"{outside.get(module, module)}.{tensor}"
