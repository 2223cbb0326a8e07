"""Denoising: the velocity kernel, and the loop that the pipeline's own scheduler leads."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from blockskip.families import Family, Text
from blockskip.precision import compute
from blockskip.progress import progress


def velocity(
    model: nn.Module,
    family: Family,
    config: Mapping[str, Any],
    latents: torch.Tensor,
    sigma: torch.Tensor,
    text: Text,
    guidance: float,
) -> torch.Tensor:
    """Kernel: the predicted v = noise - x (B, C, h, w) of latents at a noise level (B,)."""
    output = model(**family.forward_inputs(config, latents, sigma, text, guidance))[0]
    return family.velocity(output, latents)


class Streamed(Protocol):
    """A transformer that runs block by block (``loading.transformer.StreamedTransformer``)."""

    model: nn.Module

    def run(self, calls: Sequence[Callable[[], dict[str, Any]]]) -> Any:
        """(call, output, head's input) of every call."""


class Predictor:
    """Velocities of several batches at once, from a whole model, or from one that is streamed through memory."""

    def __init__(self, model: nn.Module | Streamed, family: Family, config: Mapping[str, Any], guidance: float) -> None:
        self.model, self.family, self.config, self.guidance = model, family, config, guidance

    def __call__(self, calls: Sequence[tuple[torch.Tensor, torch.Tensor, Text]]) -> list[torch.Tensor]:
        """The velocity of each (latents, sigma, text)."""
        if isinstance(self.model, nn.Module):
            return [velocity(self.model, self.family, self.config, *call, self.guidance) for call in calls]
        inputs = [
            lambda call=call: self.family.forward_inputs(self.config, *call, self.guidance)  # type: ignore[misc]
            for call in calls
        ]
        return [self.family.velocity(output[0], calls[index][0]) for index, output, _ in self.model.run(inputs)]


def denoise(
    predict: Predictor,
    scheduler: Any,
    steps: int,
    tokens: int,
    noise: Sequence[torch.Tensor],
    texts: Sequence[Text],
    negative: Sequence[Text] | None,
    scale: float,
    dtype: torch.dtype,
    device: torch.device,
    generators: Sequence[list[torch.Generator]] | None = None,
) -> list[torch.Tensor]:
    """Latents of pictures, batch by batch but all advancing together, so that a streamed block serves every batch.

    Args:
        scheduler: the pipeline's; it is copied for each batch, since schedulers remember.
        steps: sampler steps.
        tokens: image tokens of a picture (some schedulers shift by it).
        noise: starting noise of each batch, (B, C, h, w).
        texts, negative: conditioning of each batch; ``negative`` None draws without classifier-free guidance.
        generators: of each picture of each batch, for schedulers that draw noise in their steps; None: torch's own.
    """
    schedulers = []
    for _ in noise:
        own = copy.deepcopy(scheduler)
        predict.family.set_timesteps(own, steps, tokens, device)
        schedulers.append(own)
    latents = [batch * getattr(own, "init_noise_sigma", 1.0) for batch, own in zip(noise, schedulers, strict=True)]
    times = schedulers[0].timesteps
    draws = generators is not None and "generator" in inspect.signature(scheduler.step).parameters
    noisy = [{"generator": batch} if draws else {} for batch in generators or noise]
    with progress(len(times), "draw") as bar, torch.no_grad(), compute(device, dtype):
        for time in times:
            calls = []
            for index, batch in enumerate(latents):
                sigma = time.to(device=device, dtype=torch.float32).expand(batch.shape[0]) / 1000
                calls.append((batch.to(dtype), sigma, texts[index]))
                if negative is not None:
                    calls.append((batch.to(dtype), sigma, negative[index]))
            found = predict(calls)
            for index, own in enumerate(schedulers):
                if negative is None:
                    guided = found[index]
                else:
                    guided = predict.family.guide(found[2 * index], found[2 * index + 1], scale)
                latents[index] = own.step(guided, time, latents[index], return_dict=False, **noisy[index])[0]
            del found, guided
            bar.advance()
    return latents
