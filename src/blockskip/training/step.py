"""The training kernel: tensors in, loss out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from blockskip.families import Family, Text
from blockskip.method.flow import flow_matching_loss
from blockskip.method.skipping import Features, SkippedModel
from blockskip.store.int8 import dequantize_tokens


@dataclass
class MicroBatch:
    """One group, as the training step takes it.

    Args:
        latents, noise: (B, C, h, w) float32.
        sigma, weight: (B,) float32.
        text: conditioning tensors, each (B, ...).
        features: what stands in for the skipped spans, int8 or not; empty when nothing is skipped.
        places: (B, 4) float32 of the patches, where they keep their places in their pictures.
    """

    latents: torch.Tensor
    noise: torch.Tensor
    sigma: torch.Tensor
    weight: torch.Tensor
    text: Text
    features: Features
    places: torch.Tensor | None = None

    def needed(self, family: Family) -> MicroBatch:
        """The batch without the text tokens that stored front features stand in for."""
        front = any(name.startswith("front.") for name in self.features)
        return dataclasses.replace(self, text=family.without_text_tokens(self.text)) if front else self

    def to(self, device: torch.device) -> MicroBatch:
        """The batch on a device."""
        return MicroBatch(
            self.latents.to(device), self.noise.to(device), self.sigma.to(device), self.weight.to(device),
            {name: _moved(value, device) for name, value in self.text.items()},
            {name: value.to(device) for name, value in self.features.items()},
            None if self.places is None else self.places.to(device),
        )  # fmt: skip


def _moved(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on a device; a single number that fills a shape stays a single number there."""
    if value.numel() > 1 and not any(value.stride()):
        return value[(0,) * value.ndim].to(device).expand(value.shape)
    return value.to(device)


def training_loss(
    model: SkippedModel,
    family: Family,
    config: Mapping[str, Any],
    batch: MicroBatch,
    guidance: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The flow-matching loss of one micro-batch, a float32 scalar; its gradients belong to the LoRA of the middle.

    Args:
        config: the transformer's.
        guidance: guidance input of distilled models.
        dtype: of the frozen base.
    """
    batch = batch.needed(family)
    drawn = (batch.latents, batch.noise, batch.sigma, batch.text)
    inputs = family.noisy_inputs(config, *drawn, guidance, dtype, batch.places)
    output = model(dequantize_tokens(batch.features), **inputs)[0]
    target = family.target(batch.latents, batch.noise)
    return flow_matching_loss(family.velocity(output, batch.latents), target, batch.weight)
