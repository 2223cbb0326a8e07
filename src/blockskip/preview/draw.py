"""Drawing pictures: prompts encoded, latents denoised, pixels decoded, each with only its own part in memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image

from blockskip.errors import RunError, UserError
from blockskip.families import Text, stack_text
from blockskip.loading.autoencoder import load_autoencoder
from blockskip.loading.source import ModelSource
from blockskip.loading.transformer import Adapters, StreamedTransformer, load_transformer
from blockskip.memory import release
from blockskip.precision import compute
from blockskip.preview.denoise import Predictor, denoise
from blockskip.preview.hidden import HiddenPredictor


class TextEncoder(Protocol):
    """``encoding.text.encode_prompts``; given from outside because phases do not import each other."""

    def __call__(
        self, source: ModelSource, prompts: Sequence[str], length: int, dtype: torch.dtype, device: torch.device
    ) -> list[Text]:
        """The conditioning tensors of each prompt."""


@dataclass(frozen=True)
class Drawing:
    """What to draw.

    Args:
        prompts: one row of pictures each.
        seeds: one picture of each prompt each.
        height, width: pixels; None takes the model's own.
        steps: sampler steps; None takes the model's own.
        guidance_scale: None takes the model's own.
        text_length: text tokens; None takes the model's own.
        stream: load one block at a time.
        batch_size: pictures that go through the transformer together.
        read_ahead: with ``stream`` on a device of its own, copy the next block there while one computes.
    """

    prompts: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)
    height: int | None = None
    width: int | None = None
    steps: int | None = None
    guidance_scale: float | None = None
    text_length: int | None = None
    stream: bool = False
    batch_size: int = 1
    read_ahead: bool = True

    def size(self, source: ModelSource, section: str = "") -> tuple[int, int]:
        """(height, width) in pixels; ``section`` is put before their names in the sentence of an error.

        Raises:
            UserError: a side is no multiple of the model's pixel stride, or more than it has positions for.
        """
        call = source.settings.get("call", {})
        height = self.height or call.get("height") or source.full_resolution
        width = self.width or call.get("width") or source.full_resolution
        stride, largest = source.pixel_stride, source.largest_side
        for key, value in (("height", height), ("width", width)):
            if largest is not None and value > largest:
                raise UserError(f"{section}{key} = {value} is more than this model can draw; take at most {largest}.")
            if value % stride:
                near = max(stride, round(value / stride) * stride)
                raise UserError(f"{section}{key} = {value} is no multiple of {stride}; take {near}.")
        return int(height), int(width)

    def check(self, source: ModelSource, section: str = "") -> tuple[int, int]:
        """``size``, of what the model can draw in these steps.

        Raises:
            UserError: of ``size``; or the sampler has no times for so few steps: one that stretches them until the last
                has a certain noise level divides by zero where that is also the first.
        """
        height, width = self.size(source, section)
        scheduler, steps, stride = source.load("scheduler"), self.sampler_steps(source), source.pixel_stride
        with np.errstate(all="ignore"):
            tokens = (height // stride) * (width // stride)
            source.family.set_timesteps(scheduler, steps, tokens, torch.device("cpu"))
        if not bool(torch.isfinite(scheduler.timesteps).all()):
            key = f"{section}num_inference_steps"
            key = key.replace("_", "-") if section == "--" else key
            raise UserError(f"{key} = {steps} is too few for this model's sampler; take {steps + 1} or more.")
        return height, width

    def sampler_steps(self, source: ModelSource) -> int:
        """How many steps the sampler takes."""
        call = source.settings.get("call", {})
        return int(self.steps or call.get("num_inference_steps") or source.family.defaults.num_inference_steps)


def draw(
    source: ModelSource,
    drawing: Drawing,
    encode: TextEncoder,
    dtype: torch.dtype,
    device: torch.device,
    adapters: Adapters | None = None,
    hidden: Sequence[Collection[int]] = ((),),
) -> list[list[Image.Image]]:
    """Pictures by prompt and seed. The noise of a picture, its sampler's too, depends on its seed alone.

    Args:
        adapters: LoRA that acts on the transformer.
        hidden: every picture is drawn once for each entry, with the text hidden from the image in the blocks of these
            numbers; the pictures of one seed stand together.

    Raises:
        UserError: of ``Drawing.size``.
        RunError: the decoder gave values that are not finite.
    """
    family, config, call = source.family, source.config("transformer"), source.settings.get("call", {})
    height, width = drawing.size(source)
    embedded, scale = family.preview_guidance(config, call, drawing.guidance_scale)
    guided = scale > 1
    prompts = [*drawing.prompts, *([call.get("negative_prompt", family.defaults.negative_prompt)] if guided else [])]
    texts = encode(source, prompts, drawing.text_length or source.text_length, dtype, device)
    negative = texts.pop() if guided else None
    factor = family.vae_factor(source.config("vae"))
    shape = (1, family.latent_channels(source.config("vae")), height // factor, width // factor)

    jobs = [(text, seed, blocks) for text in texts for seed in drawing.seeds for blocks in hidden]
    batches = [jobs[start : start + drawing.batch_size] for start in range(0, len(jobs), drawing.batch_size)]
    seeded = [[torch.Generator("cpu").manual_seed(seed) for _, seed, _ in batch] for batch in batches]
    drawn = [torch.cat([torch.randn(shape, generator=own, dtype=dtype) for own in batch]) for batch in seeded]
    noise = [batch.to(device) for batch in drawn]
    stacked = [_to(stack_text([text for text, _, _ in batch]), device) for batch in batches]
    opposite = None if negative is None else [_to(stack_text([negative] * len(batch)), device) for batch in batches]
    model = (StreamedTransformer(source, dtype, device, adapters, read_ahead=drawing.read_ahead) if drawing.stream
             else load_transformer(source, [], dtype, device, adapters))  # fmt: skip
    rows = [[blocks for _, _, blocks in batch] for batch in batches]
    predict = (HiddenPredictor(model, family, config, embedded, rows) if any(hidden)
               else Predictor(model, family, config, embedded))  # fmt: skip
    tokens = (height // source.pixel_stride) * (width // source.pixel_stride)
    steps = drawing.sampler_steps(source)
    scheduler, conditioning = source.load("scheduler"), (stacked, opposite, scale)
    latents = denoise(predict, scheduler, steps, tokens, noise, *conditioning, dtype, device, seeded)
    del drawn, conditioning, model, predict, noise, stacked, opposite, texts, negative, jobs, batches
    release()
    flat = iter(decode(source, [picture[None] for batch in latents for picture in batch], dtype, device))
    return [[next(flat) for _ in drawing.seeds for _ in hidden] for _ in drawing.prompts]


def decode(
    source: ModelSource, latents: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device
) -> list[Image.Image]:
    """Pictures of latents, each (1, C, h, w); float16 is avoided, since some autoencoders overflow in it.

    Raises:
        RunError: the decoder gave values that are not finite.
    """
    safe = torch.float32 if dtype == torch.float16 else dtype
    vae = load_autoencoder(source, "decoder", safe, device)
    pictures = [_picture(source, vae, one, safe, device) for one in latents]
    del vae
    release()
    return pictures


def _picture(
    source: ModelSource, vae: Any, latents: torch.Tensor, dtype: torch.dtype, device: torch.device
) -> Image.Image:
    with torch.no_grad(), compute(device, dtype):
        pixels = source.family.decode(vae, latents.to(dtype)).float().cpu()[0]
    if not bool(torch.isfinite(pixels).all()):
        raise RunError(f"The preview failed: the autoencoder gave values that are not finite in {dtype}.")
    array = (pixels / 2 + 0.5).clamp(0, 1).permute(1, 2, 0).numpy()
    return Image.fromarray((array * 255).round().astype(np.uint8))


def _to(text: Text, device: torch.device) -> Text:
    return {name: value.to(device) for name, value in text.items()}
