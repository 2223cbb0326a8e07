"""A selection that takes seconds, and an encoder for it."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from blockskip.selection.request import Request

SMALL: dict[str, Any] = {
    "prompts": ("{} in the snow", "a cat"), "images_per_prompt": 2, "steps": 2, "height": 32, "width": 32, "count": 2,
    "training": {"train.steps": 1, "train.gradient_accumulation_steps": 1, "lora.rank": 2, "data.text_length": 12},
}  # fmt: skip


class Pixels:
    """An encoder that forgets nothing: the picture's own bytes, centred."""

    name = "pixels"

    def embed(self, images: list[Image.Image] | torch.Tensor) -> torch.Tensor:
        rows = torch.stack([torch.from_numpy(np.array(image.resize((32, 32)))).double().flatten() for image in images])
        return torch.nn.functional.normalize(rows - 128, dim=1)


def request(model: Path | str, folder: Path, subjects: tuple[str, ...], **changes: Any) -> Request:
    """Of a tiny model's selection, written into a folder."""
    return Request(**{"model": str(model), "images": subjects, "output": folder / "selection.json", **SMALL, **changes})
