"""What the small FLUX and SANA pipelines have in common: parts that are trained together, saved and read again."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn
from transformers import PreTrainedModel

TEXT = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
"""How captions become ids."""


class Parts(nn.Module):
    """The transformer and the text encoders of one pipeline, with their tokenizers.

    A subclass for each architecture says how captions become ids (`ids`), how the velocity follows from noisy latents
    (`forward`), and which pipeline they are saved as (`pipeline`).
    """

    transformer: nn.Module

    def ids(self, captions: list[str]) -> dict[str, Tensor]:
        """Token ids (and masks) of captions, each of shape (captions, length)."""
        raise NotImplementedError

    def forward(self, noisy: Tensor, sigma: Tensor, ids: dict[str, Tensor]) -> Tensor:
        """Velocity of noisy latents of shape (batch, channels, height, width); sigma (batch,); ids (batch, length)."""
        raise NotImplementedError

    def pipeline(self, vae: nn.Module, shift: float) -> DiffusionPipeline:
        """The pipeline around these parts, with a scheduler that shifts sigmas by `shift`."""
        raise NotImplementedError

    @property
    def configuration(self) -> dict[str, Any]:
        """What a checkpoint must remember to build these parts again."""
        return {"depth": self.depth, "heads": self.heads}

    depth: int
    heads: int


def start_linears(transformer: nn.Module, zero: Callable[[str], bool]) -> None:
    """Xavier weights and zero biases for every linear layer; zero weights for the names that `zero` picks."""
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
            if zero(name):
                nn.init.zeros_(module.weight)


@torch.no_grad()
def grow_embedding(encoder: PreTrainedModel, count: int) -> None:
    """Adds rows for new tokens to the text encoder's embedding, as spread as the old ones; the old rows stay."""
    old = encoder.get_input_embeddings().weight
    if count > len(old):
        fresh = torch.randn(count - len(old), old.shape[1]) * old.std()
        encoder.set_input_embeddings(nn.Embedding(count, old.shape[1], _weight=torch.cat([old, fresh])))
    encoder.config.vocab_size = count


def save_pipeline(parts: Parts, vae: nn.Module, shift: float, folder: Path, description: str) -> None:
    """Writes a bfloat16 pipeline and its `builtin.json` beside `folder`, then puts them in its place.

    The text encoders' configs say float32, which is what diffusers makes of the other parts when no dtype is asked for;
    transformers would keep them bfloat16.
    """
    pipeline = parts.pipeline(vae, shift).to(torch.bfloat16)
    fresh, old = folder.with_name(f"{folder.name}.new"), folder.with_name(f"{folder.name}.old")
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    pipeline.save_pretrained(fresh)
    for path in fresh.glob("text_encoder*/config.json"):
        config = json.loads(path.read_text(encoding="utf-8")) | {"dtype": "float32"}
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for path in fresh.glob("*/config.json"):  # where a part was loaded from is nobody's business
        config = json.loads(path.read_text(encoding="utf-8"))
        if config.pop("_name_or_path", None) is not None:
            path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    (fresh / "builtin.json").write_text(description, encoding="utf-8")
    for file in fresh.rglob("*.safetensors"):
        file.chmod(0o644)
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
