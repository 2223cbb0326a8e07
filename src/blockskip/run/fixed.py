"""Pictures at fixed noise levels with fixed noise: what a probe compares, and what a held-out loss is measured on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image, ImageOps

from blockskip.data.pixels import load_pixels
from blockskip.encoding.text import encode_prompts
from blockskip.families import Family, Text, stack_text
from blockskip.loading.autoencoder import load_autoencoder
from blockskip.loading.source import ModelSource
from blockskip.loading.transformer import Adapters, StreamedTransformer, load_transformer
from blockskip.memory import release
from blockskip.method.flow import flow_matching_loss
from blockskip.precision import compute
from blockskip.preview.denoise import Predictor
from blockskip.seeds import derive_seed, gaussian

#: Noise levels that the held-out loss is the mean of.
NINE_SIGMAS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True)
class FixedSamples:
    """Latents of pictures with one caption each, and the noise of each picture.

    Args:
        latents: (N, C, h, w) float32.
        noise: standard normal, of the same shape: that of a picture is the same at every noise level.
        texts: of each picture, with a batch of one.
        empty: of the empty caption.
        family: which says how latents become noisy.
    """

    latents: torch.Tensor
    noise: torch.Tensor
    texts: tuple[Text, ...]
    empty: Text
    family: Family

    def __len__(self) -> int:
        return len(self.latents)

    def call(
        self, rows: Sequence[int], sigma: float, dtype: torch.dtype, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor, Text]:
        """(noisy latents in the base's dtype, sigma (B,) float32, text) of some pictures, which may come repeatedly."""
        picked = list(rows)
        level = torch.full((len(picked),), sigma)
        noisy = self.family.add_noise(self.latents[picked], self.noise[picked], level).to(device, dtype)
        text = stack_text([self.texts[row] for row in picked])
        return noisy, level.to(device), {name: value.to(device) for name, value in text.items()}


def fixed_samples(
    source: ModelSource,
    pictures: Sequence[Path],
    captions: Sequence[str],
    size: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    seed: int = 0,
    text_length: int | None = None,
    stream: bool = False,
) -> FixedSamples:
    """Encode pictures whole (the middle, where their aspect is another) at one size.

    Args:
        captions: one a picture.
        size: (width, height) in pixels, multiples of the model's pixel stride.
        seed: of the noise; picture ``i`` of any list has the same.
        stream: hold one layer of a text encoder at a time.
    """
    distinct = list(dict.fromkeys([*captions, ""]))
    length = text_length or source.text_length
    texts = dict(zip(distinct, encode_prompts(source, distinct, length, dtype, device, stream), strict=True))
    family, config = source.family, source.config("vae")
    factor = family.vae_factor(config)
    shape = (family.latent_channels(config), size[1] // factor, size[0] // factor)
    vae = load_autoencoder(source, "encoder", dtype, device)
    latents = []
    for index, path in enumerate(pictures):
        pixels = _middle(path, size)[None].to(device, dtype)
        noise = gaussian(shape, derive_seed(seed, "fixed", index, "posterior"))[None].to(device)
        with torch.no_grad(), compute(device, dtype):
            latents.append(family.encode_pixels(vae, pixels, noise).float().cpu())
    del vae
    release()
    noise = torch.stack([gaussian(shape, derive_seed(seed, "fixed", index)) for index in range(len(pictures))])
    chosen = tuple(texts[caption] for caption in captions)
    return FixedSamples(torch.cat(latents), noise, chosen, texts[""], family)


def _middle(path: Path, size: tuple[int, int]) -> torch.Tensor:
    """(3, height, width) in [-1, 1]: the largest part of the picture's middle with the aspect of ``size``, scaled."""
    with Image.open(path) as image:
        width, height = ImageOps.exif_transpose(image).size
    scale = max(size[0] / width, size[1] / height)
    scaled = max(size[0], round(width * scale)), max(size[1], round(height * scale))
    return load_pixels(path, scaled, ((scaled[0] - size[0]) // 2, (scaled[1] - size[1]) // 2, *size))


def heldout_loss(
    source: ModelSource,
    adapters: Adapters | None,
    samples: FixedSamples,
    dtype: torch.dtype,
    device: torch.device,
    *,
    guidance: float = 1.0,
    sigmas: Sequence[float] = NINE_SIGMAS,
    stream: bool = False,
) -> list[float]:
    """Flow-matching loss of the whole, unskipped model with an adapter, for each noise level.

    Args:
        adapters: the LoRA; None is the base.
        guidance: guidance input, for models distilled with one.
        stream: hold one block in memory at a time.

    Returns:
        The mean over the pictures at each of ``sigmas``, in their order.
    """
    model = (StreamedTransformer(source, dtype, device, adapters) if stream
             else load_transformer(source, [], dtype, device, adapters))  # fmt: skip
    predict = Predictor(model, source.family, source.config("transformer"), guidance)
    everything = range(len(samples))
    target = source.family.target(samples.latents, samples.noise)
    with torch.no_grad(), compute(device, dtype):
        found = predict([samples.call(everything, sigma, dtype, device) for sigma in sigmas])
    del model, predict
    release()
    return [float(flow_matching_loss(velocity.float().cpu(), target)) for velocity in found]
