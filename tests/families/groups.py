"""What tests put into a tiny pipeline's transformer: groups of random samples, and LoRA that is no longer zero."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from blockskip.adapters.lora import add_lora, target_names
from blockskip.families import Family, Text
from blockskip.loading.source import ModelSource
from blockskip.loading.transformer import empty_transformer, load_transformer
from blockskip.method.capture import capture
from blockskip.method.skipping import ConstantResidual, Features, SkippedModel, SkipRule
from blockskip.method.split import Split
from blockskip.training.step import MicroBatch, training_loss
from tests.tiny_families import TINY

CPU = torch.device("cpu")
GRID = (4, 6)  # rows and columns of tokens, not square on purpose
GUIDANCE = 3.5  # read by models with a guidance input only
RANK, ALPHA = 4, 8.0


def random_text(source: ModelSource, batch: int, seed: int, length: int = 6) -> Text:
    """Conditioning tensors (B, ...) as `encode_text` gives them; masks are ragged."""
    generator = torch.Generator().manual_seed(seed)
    return TINY[source.family.name].random_text(source.config("transformer"), batch, length, generator)


def group(source: ModelSource, batch: int = 2, seed: int = 0, grid: tuple[int, int] | None = None) -> MicroBatch:
    """A micro-batch of random latents, noise, noise levels, weights and text, without features.

    Args:
        grid: rows and columns of tokens.
    """
    generator = torch.Generator().manual_seed(seed + 1000)
    channels = source.family.latent_channels(source.config("vae"))
    side = source.family.token_patch(source.config("transformer"))
    shape = (batch, channels, *(side * tokens for tokens in grid or GRID))
    latents, noise = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    sigma, weight = torch.rand(batch, generator=generator), 0.5 + torch.rand(batch, generator=generator)
    return MicroBatch(latents, noise, sigma, weight, random_text(source, batch, seed), {})


def forward_inputs(source: ModelSource, batch: MicroBatch, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The keyword arguments of the transformer's `forward`."""
    drawn = (batch.latents, batch.noise, batch.sigma, batch.text)
    return source.family.noisy_inputs(source.config("transformer"), *drawn, GUIDANCE, dtype, batch.places)


def transformer(source: ModelSource, skip: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> nn.Module:
    """The transformer on the CPU, without the blocks in `skip`."""
    return load_transformer(source, skip, dtype, CPU)


def capture_features(
    source: ModelSource,
    full: nn.Module,
    split: Split,
    batch: MicroBatch,
    rule: SkipRule | None = None,
    dtype: torch.dtype = torch.float32,
) -> Features:
    """What stands in for the skipped spans, from one forward pass of the full base."""
    with torch.no_grad():
        inputs = forward_inputs(source, batch, dtype)
        return capture(full, source.family.layout, split, rule or ConstantResidual(), inputs)[1]


def layers(source: ModelSource, model: nn.Module, middle: Sequence[int]) -> list[str]:
    """Full names of the family's own LoRA layers in the middle blocks."""
    return target_names(model, source.family.layout, middle, source.family.lora_targets, each=False)


def adapt(
    source: ModelSource,
    model: nn.Module,
    middle: Sequence[int],
    *,
    zero: bool = False,
    alpha: float = ALPHA,
    dropout: float = 0.0,
) -> dict[str, nn.Parameter]:
    """LoRA on the middle blocks, the same for the same blocks; both factors count unless `zero`. By name."""
    add_lora(model, layers(source, model, middle), RANK, alpha, dropout, seed=3)
    found = {name: value for name, value in sorted(model.named_parameters()) if "lora_" in name}
    generator = torch.Generator().manual_seed(4)
    for name, value in found.items():
        if ".lora_B." in name and not zero:
            value.data = 0.2 * torch.randn(value.shape, generator=generator)
    return found


def unheard(family: Family, model: nn.Module, middle: Sequence[int], name: str) -> bool:
    """Whether no gradient reaches a layer's or a LoRA tensor's name, since only text that nobody reads goes through."""
    last = f"{family.layout.names(model)[middle[-1]]}."
    return name.startswith(last) and any(part in name for part in TINY[family.name].deaf)


def stubbed(source: ModelSource, split: Split, rule: SkipRule | None = None) -> SkippedModel:
    """The transformer with the split's blocks never loaded."""
    num_blocks = source.family.layout.count(empty_transformer(source))
    model = transformer(source, split.skipped(num_blocks))
    return SkippedModel(model, source.family.layout, split, rule or ConstantResidual())


def loss_of(source: ModelSource, model: SkippedModel, batch: MicroBatch) -> torch.Tensor:
    """The training kernel's loss in float32."""
    return training_loss(model, source.family, source.config("transformer"), batch, GUIDANCE, torch.float32)


def distance(value: torch.Tensor, reference: torch.Tensor) -> float:
    """|value - reference| / |reference|."""
    return float((value - reference).norm() / reference.norm())
