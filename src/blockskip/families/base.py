"""What a family of transformers tells the rest of the package; everything else is generic."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from blockskip.families.packing import positions_at
from blockskip.method.flow import Distribution, add_noise, velocity_target
from blockskip.method.layout import BlockLayout

#: What a prompt becomes: named tensors whose first dimension is the batch.
Text = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Defaults:
    """A family's own settings, taken when the user sets none.

    Args:
        full_resolution: pixels (s_max); the training resolution is half of it.
        text_length: text tokens.
        distribution, shift: of sigma in training, as the family's diffusers script has them.
        guidance_scale: guidance input in training, for models distilled with one.
        num_inference_steps, preview_guidance, negative_prompt: of previews.
    """

    full_resolution: int
    text_length: int
    distribution: Distribution
    shift: float
    guidance_scale: float
    num_inference_steps: int
    preview_guidance: float
    negative_prompt: str = ""


class Family(ABC):
    """One DiT architecture: a BlockLayout and the training side that differs from model to model.

    Methods that are part of a kernel take and return tensors only; they run on fake tensors too.
    """

    name: ClassVar[str]
    #: Class names in diffusers.
    pipeline_class: ClassVar[str]
    transformer_class: ClassVar[str]
    layout: ClassVar[BlockLayout]
    defaults: ClassVar[Defaults]
    #: (tokenizer, text encoder) as named in the pipeline.
    text_parts: ClassVar[tuple[tuple[str, str], ...]]
    #: Text encoders of ``text_parts`` that a pipeline may lack (null in its ``model_index.json``).
    optional_encoders: ClassVar[tuple[str, ...]] = ()
    #: Where the parts are published that the published pipelines lack, by part.
    elsewhere: ClassVar[Mapping[str, str]] = {}
    #: Layer names inside a block that take LoRA, as the family's diffusers script has them.
    lora_targets: ClassVar[tuple[str, ...]]
    #: Whether the middle blocks read the text themselves, also when the front features are stored.
    text_in_blocks: ClassVar[bool]
    #: Whether ``forward`` is given the positions of image tokens, so that a patch can keep its place in its picture.
    takes_positions: ClassVar[bool] = False

    @abstractmethod
    def vae_factor(self, vae_config: Mapping[str, Any]) -> int:
        """Pixels per latent pixel."""

    @abstractmethod
    def token_patch(self, transformer_config: Mapping[str, Any]) -> int:
        """Latent pixels per side of a token."""

    def pixel_stride(self, vae_config: Mapping[str, Any], transformer_config: Mapping[str, Any]) -> int:
        """Pixels per side of a token; sides of patches are multiples of it."""
        return self.vae_factor(vae_config) * self.token_patch(transformer_config)

    def largest_side(self, vae_config: Mapping[str, Any], transformer_config: Mapping[str, Any]) -> int | None:
        """Pixels per side of the largest picture that the model has positions for; None: of any size."""
        return None

    @abstractmethod
    def tokenize(self, tokenizers: Mapping[str, Any], prompts: Sequence[str], length: int) -> dict[str, torch.Tensor]:
        """Token ids (and masks), int64 (B, tokens), by text encoder, for ``encode_text``."""

    def token_counts(self, length: int) -> dict[str, int]:
        """How many ids and mask entries ``tokenize`` gives a prompt, by name."""
        return {**{encoder: length for _, encoder in self.text_parts}, "mask": length}

    def text_places(self, ids: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
        """By text encoder, at which text token of the transformer's attention the first of its ids stands.

        Below zero where the first ids are left out; encoders of which the attention gets no tokens are not named.
        Several places where the attention gets an encoder's tokens as often.

        Args:
            ids: of ``tokenize``.
        """
        return {self.text_parts[-1][1]: (0,)}

    @abstractmethod
    def encode_text(self, encoders: Mapping[str, nn.Module], ids: Mapping[str, torch.Tensor]) -> Text:
        """Kernel: the conditioning tensors of a batch of prompts, each (B, ...), of the encoders that are given."""

    def join_text(self, config: Mapping[str, Any], text: Text, length: int) -> Text:
        """Kernel: what all encoders together make of a batch of prompts, where that is more than their tensors by name.

        Args:
            config: the transformer's.
            text: everything that ``encode_text`` gave, encoder by encoder.
            length: text tokens, as given to ``tokenize``.
        """
        return text

    @abstractmethod
    def encode_pixels(self, vae: Any, pixels: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Kernel: normalised latents (B, C, h, w) of pixels (B, 3, H, W) in [-1, 1]; the exact inverse of ``decode``.

        Args:
            noise: standard normal (B, C, h, w), for autoencoders whose latents are a distribution.
        """

    @abstractmethod
    def decode(self, vae: Any, latents: torch.Tensor) -> torch.Tensor:
        """Kernel: pixels (B, 3, H, W), about [-1, 1], of normalised latents (B, C, h, w)."""

    def add_noise(self, latents: torch.Tensor, noise: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        """Kernel: noisy latents (B, C, h, w) at noise levels (B,); (1 - sigma) * x + sigma * noise."""
        return add_noise(latents, noise, sigma)

    def target(self, latents: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Kernel: what ``velocity`` is trained to be, (B, C, h, w); v = noise - x."""
        return velocity_target(latents, noise)

    @abstractmethod
    def forward_inputs(
        self, config: Mapping[str, Any], latents: torch.Tensor, sigma: torch.Tensor, text: Text, guidance: float
    ) -> dict[str, Any]:
        """Kernel: keyword arguments of the transformer's ``forward``.

        Args:
            config: the transformer's config.
            latents: noisy latents (B, C, h, w).
            sigma: noise level (B,) float32 in [0, 1].
            guidance: guidance input; ignored by models without one.
        """

    def noisy_inputs(
        self,
        config: Mapping[str, Any],
        latents: torch.Tensor,
        noise: torch.Tensor,
        sigma: torch.Tensor,
        text: Text,
        guidance: float,
        dtype: torch.dtype,
        places: torch.Tensor | None = None,
    ) -> dict[str, Any]:
        """Kernel: ``forward_inputs`` of latents noised in float32, then cast to the base's dtype.

        Args:
            places: (B, 4) float32, where the patches lie in their pictures: left, top, width and height in the
                picture's tokens; None: every patch has positions as if it were a picture.
        """
        noisy = self.add_noise(latents, noise, sigma).to(dtype)
        inputs = self.forward_inputs(config, noisy, sigma, text, guidance)
        if places is None:
            return inputs
        side = self.token_patch(config)
        return inputs | self.placed(inputs, positions_at(places, latents.shape[2] // side, latents.shape[3] // side))

    def placed(self, inputs: Mapping[str, Any], positions: torch.Tensor) -> dict[str, Any]:
        """Kernel: the arguments that give image tokens other positions; for a family that ``takes_positions``.

        Args:
            inputs: of ``forward_inputs``.
            positions: (B, tokens, 2) float32, each sample's rows and columns; not always whole numbers.
        """
        raise NotImplementedError(f"{self.name} takes no positions")

    @abstractmethod
    def velocity(self, output: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        """Kernel: v = noise - x, shaped like the latents (B, C, h, w), from the transformer's first output.

        A family that overrides ``target`` gives what its pipeline's scheduler takes in the place of v.
        """

    def guide(self, conditional: torch.Tensor, unconditional: torch.Tensor, scale: float) -> torch.Tensor:
        """Kernel: the guided velocity (B, C, h, w); classifier-free guidance, u + scale * (c - u)."""
        return unconditional + scale * (conditional - unconditional)

    @abstractmethod
    def latent_channels(self, vae_config: Mapping[str, Any]) -> int:
        """C of the latents (B, C, h, w)."""

    @abstractmethod
    def set_timesteps(self, scheduler: Any, steps: int, tokens: int, device: torch.device) -> None:
        """Prepare the pipeline's own scheduler as its ``__call__`` does, for pictures of a number of image tokens."""

    def prepare(self, model: Any) -> None:  # noqa: B027
        """Change what a transformer needs changed, right after its construction and ahead of its weights."""

    def enable_checkpointing(self, model: Any) -> None:
        """Let the transformer's blocks run again in the backward pass instead of keeping their activations."""
        model.enable_gradient_checkpointing()

    def pipeline_call(self, index: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of the pipeline's call that suit the model, where its ``model_index.json`` tells them."""
        return {}

    def without_text_tokens(self, text: Text) -> Text:
        """Text whose token embeddings are zeros of no size in memory: enough when the front features are stored."""
        if self.text_in_blocks:
            return text
        return {
            name: torch.zeros((), dtype=value.dtype, device=value.device).expand(value.shape)
            if value.ndim == 3
            else value
            for name, value in text.items()
        }

    def preview_guidance(
        self, config: Mapping[str, Any], call: Mapping[str, Any], wanted: float | None
    ) -> tuple[float, float]:
        """(guidance input, classifier-free guidance scale) of a preview.

        Args:
            config: the transformer's.
            call: the pipeline call that suits the model, from ``builtin.json``; may be empty.
            wanted: the user's ``preview.guidance_scale``.
        """
        scale = wanted if wanted is not None else call.get("guidance_scale", self.defaults.preview_guidance)
        return 1.0, float(scale)


def stack_text(texts: Sequence[Text]) -> Text:
    """The text of a group from its samples' texts, each with a batch of one.

    Where a family's texts are as long as their prompts, shorter tokens ``<name>`` (1, tokens, D) are filled with zeros
    on the right, and ``<name>_mask`` (B, tokens) int64 is one where there is a token.
    """
    stacked: Text = {}
    for name in texts[0]:
        values = [text[name] for text in texts]
        counts = [value.shape[1] for value in values]
        longest = max(counts)
        if len(set(counts)) > 1:
            values = [F.pad(value, (0, 0, 0, longest - value.shape[1])) for value in values]
            places = torch.arange(longest, device=values[0].device)
            stacked[f"{name}_mask"] = torch.stack([(places < count).long() for count in counts])
        stacked[name] = torch.cat(values)
    return stacked
