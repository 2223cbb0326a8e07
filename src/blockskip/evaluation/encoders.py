"""Encoders of pictures by name: those that come as packages, and DINO and CLIP from a folder or the hub."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModel,
    BitImageProcessorPil,
    CLIPImageProcessorPil,
    CLIPVisionModelWithProjection,
    ViTImageProcessorPil,
)
from transformers.utils import logging as transformers_logging

from blockskip.errors import UserError
from blockskip.evaluation.encoder import BATCH, Encoder, ImageEncoder, to_pixels
from blockskip.evaluation.mobilenet import MobileNetEncoder

#: Encoders of DreamBooth's protocol (arXiv 2208.12242) by their short names.
PUBLISHED = {"dino": "facebook/dino-vits16", "clip": "openai/clip-vit-base-patch32"}
#: How the pictures of each kind of model are prepared.
_PROCESSORS: dict[str, Any] = {
    "vit": ViTImageProcessorPil,
    "dinov2": BitImageProcessorPil,
    "clip": CLIPImageProcessorPil,
    "clip_vision_model": CLIPImageProcessorPil,
}


class TransformersEncoder:
    """DINO (the class token of a ViT's last layer) or CLIP (the projected picture), as transformers has them.

    ``name`` is the folder's or the hub's; ``identity`` has a hash of the weights beside it.

    Args:
        path: folder or hub id.
        device: where it runs.

    Raises:
        UserError: there is no such model, or it is of another kind.
    """

    def __init__(self, path: str, device: torch.device = torch.device("cpu")) -> None:
        folder = Path(path).expanduser()
        where = str(folder) if folder.is_dir() else path
        start = f'the image encoder "{path}"'
        try:
            kind = AutoConfig.from_pretrained(where).model_type
            if kind not in _PROCESSORS:
                raise UserError(f'{start} is a "{kind}"; supported are {", ".join(sorted(_PROCESSORS))}.')
            cls = CLIPVisionModelWithProjection if kind.startswith("clip") else AutoModel
            transformers_logging.disable_progress_bar()
            self.processor = _PROCESSORS[kind].from_pretrained(where)
            network = cls.from_pretrained(where, dtype=torch.float32)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise UserError(f"{start} is no folder here and cannot be fetched ({reason}).") from None
        self.name, self.is_clip = Path(path).name, kind.startswith("clip")
        self.identity = f"{self.name} ({_digest(network)})"
        self.network = network.to(device).eval().requires_grad_(False)
        self._device = device

    @torch.no_grad()
    def embed(self, images: list[Image.Image] | torch.Tensor) -> torch.Tensor:
        """(B, D) float32 unit vectors, on the CPU.

        Args:
            images: pictures of any sizes, or pixels (B, 3, H, W) in [-1, 1].

        Raises:
            ValueError: there are no pictures.
        """
        if len(images) == 0:
            raise ValueError("there is no picture to embed")
        return torch.cat([self._embed(images[start : start + BATCH]) for start in range(0, len(images), BATCH)])

    def _embed(self, images: list[Image.Image] | torch.Tensor) -> torch.Tensor:
        pixels = images if isinstance(images, torch.Tensor) else [to_pixels(image)[0] for image in images]
        arrays = [((one + 1) * 127.5).round().clamp(0, 255).byte().permute(1, 2, 0).numpy() for one in pixels]
        inputs = self.processor([Image.fromarray(array) for array in arrays], return_tensors="pt")["pixel_values"]
        output = self.network(pixel_values=inputs.to(self._device))
        embeds = getattr(output, "image_embeds", None)
        features = output.last_hidden_state[:, 0] if embeds is None else embeds
        return F.normalize(features.float(), dim=1).cpu()


def _digest(network: torch.nn.Module) -> str:
    """Eight digits that tell two sets of weights apart, whatever their folders are called."""
    found = hashlib.sha256()
    for name, value in sorted(network.state_dict().items()):
        found.update(name.encode())
        found.update(value.contiguous().view(torch.uint8).numpy() if value.ndim else str(value.item()).encode())
    return found.hexdigest()[:8]


def open_encoder(name: str, device: torch.device = torch.device("cpu")) -> Encoder:
    """The encoder of a name.

    Args:
        name: ``efficientnet`` or ``mobilenet`` (packages, nothing is downloaded), ``dino``, ``clip``, a folder or a hub
            id.

    Raises:
        UserError: it is not installed, or cannot be had.
    """
    if name == "efficientnet":
        return ImageEncoder(device)
    if name == "mobilenet":
        return MobileNetEncoder(device)
    return TransformersEncoder(PUBLISHED.get(name, name), device)
