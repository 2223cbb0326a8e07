"""Real previews on a tiny pipeline, their real tensors counted: what the plan of a preview is held to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from blockskip.adapters.frozen import FrozenAdapters
from blockskip.encoding.text import encode_prompts
from blockskip.families import Text
from blockskip.loading.source import ModelSource
from blockskip.loading.transformer import StreamedTransformer, empty_transformer
from blockskip.planner.counting import HOST, LiveBytes, tables
from blockskip.planner.setting import Setting
from blockskip.preview import draw
from tests.planner.real_runs import CPU, read_blocks_are_weights


@dataclass
class Counted:
    """What was alive at most while a part of a preview ran, device and host together in ``pool_peak``."""

    device_peak: int
    device_split: dict[str, int]
    pool_peak: int
    flops: int


def adapter_of(setting: Setting) -> dict[str, tuple[torch.Tensor, torch.Tensor, float]]:
    """A random adapter by layer, as ``FrozenAdapters.of_pairs`` takes it."""
    model, rank = empty_transformer(setting.source), setting.config.lora.rank
    shapes: dict[str, Any] = {name: model.get_submodule(name).weight.shape for name in setting.targets}
    return {name: (torch.randn(rank, inner), torch.randn(outer, rank), 0.1) for name, (outer, inner) in shapes.items()}


def previewed(setting: Setting) -> dict[str, Counted]:
    """The previews of a setting, really drawn: ``denoise`` and ``decode``, and what each held at most."""
    source, options, live = setting.source, setting.config.preview, LiveBytes()
    found: dict[str, Counted] = {}
    pairs = adapter_of(setting)
    denoise, decode, load = draw.denoise, draw.decode, ModelSource.load

    def counted(name: str) -> None:
        found[name] = Counted(live.device_peak, dict(live.device_split), live.pool_peak, live.flops)
        live.flops = 0

    def encode(*args: Any) -> list[Text]:
        texts = encode_prompts(*args)
        live.tag([value for text in texts for value in text.values()], HOST)
        return texts

    def denoised(predict: Any, scheduler: Any, steps: int, tokens: int, noise: Any, texts: Any, negative: Any,
                 *rest: Any) -> list[torch.Tensor]:  # fmt: skip
        streamed = isinstance(predict.model, StreamedTransformer)
        model = predict.model.model if streamed else predict.model
        live.tag([value for value in model.parameters() if not value.is_meta], "weights")
        live.tag([*(value for value in model.buffers() if not value.is_meta), *tables(model)], "weights")
        live.tag([value for text in (*texts, *(negative or ())) for value in text.values()], "other")
        live.tag([tensor for a, b, _ in pairs.values() for tensor in (a, b)], "adapters")
        live.tag(noise, "other")
        family = predict.family

        def tables_to_host(scheduler: Any) -> None:
            live.tag([value for value in vars(scheduler).values() if isinstance(value, torch.Tensor)], HOST)

        def set_timesteps(scheduler: Any, *arguments: Any) -> None:
            type(family).set_timesteps(family, scheduler, *arguments)
            tables_to_host(scheduler)

        tables_to_host(scheduler)
        with patch.object(family, "set_timesteps", set_timesteps):
            live.reset_peaks()
            live.flops = 0
            latents = denoise(predict, scheduler, steps, tokens, noise, texts, negative, *rest)
        counted("denoise")
        live.tag([tensor for a, b, _ in pairs.values() for tensor in (a, b)], HOST)
        live.tag(tables(model), HOST)  # diffusers keeps Qwen's table of positions beyond the model, in a cache
        return latents

    def loaded(source: ModelSource, part: str, *args: Any) -> Any:
        made = load(source, part, *args)
        if part == "vae":
            live.tag_module(made)
            live.reset_peaks()
        return made

    def decoded(source: ModelSource, latents: Sequence[torch.Tensor], *rest: Any) -> Any:
        live.tag(latents, "other")
        pictures = decode(source, latents, *rest)
        counted("decode")
        return pictures

    drawing = draw.Drawing(
        options.prompts, tuple(range(options.images)), options.height, options.width, options.num_inference_steps,
        options.guidance_scale, setting.text_length, options.stream, options.batch_size,
    )  # fmt: skip
    with (
        patch.object(draw, "denoise", denoised), patch.object(draw, "decode", decoded),
        patch.object(ModelSource, "load", loaded), live, read_blocks_are_weights(live),
    ):  # fmt: skip
        draw.draw(source, drawing, encode, setting.dtype, CPU, FrozenAdapters.of_pairs(pairs))
    return found
