"""The training kernel: tensors in, loss out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from blockskip.families import Family, Text
from blockskip.method.flow import flow_matching_loss, velocity_target
from blockskip.method.skipping import Features, SkippedModel


@dataclass
class MicroBatch:
    """One group, as the training step takes it.

    Args:
        latents, noise: (B, C, h, w) float32.
        sigma, weight: (B,) float32.
        text: conditioning tensors, each (B, ...).
        features: what stands in for the skipped spans; empty when nothing is skipped.
    """

    latents: torch.Tensor
    noise: torch.Tensor
    sigma: torch.Tensor
    weight: torch.Tensor
    text: Text
    features: Features

    def to(self, device: torch.device) -> MicroBatch:
        """The batch on a device."""
        return MicroBatch(
            self.latents.to(device), self.noise.to(device), self.sigma.to(device), self.weight.to(device),
            {name: value.to(device) for name, value in self.text.items()},
            {name: value.to(device) for name, value in self.features.items()},
        )  # fmt: skip


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
    front = any(name.startswith("front.") for name in batch.features)
    text = family.without_text_tokens(batch.text) if front else batch.text
    inputs = family.noisy_inputs(config, batch.latents, batch.noise, batch.sigma, text, guidance, dtype)
    output = model(batch.features, **inputs)[0]
    target = velocity_target(batch.latents, batch.noise)
    return flow_matching_loss(family.velocity(output, batch.latents), target, batch.weight)
