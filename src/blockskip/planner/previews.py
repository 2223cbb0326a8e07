"""What previews take: text, denoising by the whole or the streamed model, and decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import nn

from blockskip.adapters.frozen import FrozenAdapters
from blockskip.families import Text, stack_text
from blockskip.method.layout import State
from blockskip.method.skipping import run_block, run_head
from blockskip.planner.counting import LiveBytes
from blockskip.planner.fakes import FakeBlocks
from blockskip.planner.parts import empty_part, fake, fake_tensors, stored_dtype
from blockskip.planner.phases import finish, kernel, latent_shape, loading, new
from blockskip.planner.plan import PhasePlan
from blockskip.planner.setting import Setting
from blockskip.preview.denoise import velocity
from blockskip.preview.draw import Drawing


def preview(setting: Setting, text: Text, text_plan: PhasePlan, adapter: int) -> PhasePlan:
    """Text, denoising by the whole or the streamed model, and decoding; the largest of the three counts."""
    source, options = setting.source, setting.config.preview
    family, config, call = source.family, source.config("transformer"), source.settings.get("call", {})
    drawing = Drawing((), height=options.height, width=options.width)
    height, width = drawing.size(source, "preview.")
    embedded, scale = family.preview_guidance(config, call, options.guidance_scale)
    steps = options.num_inference_steps or call.get("num_inference_steps") or family.defaults.num_inference_steps
    pictures = max(1, len(options.prompts)) * options.images
    batch = min(options.batch_size, pictures)
    batches, passes = -(-pictures // batch), 2 if scale > 1 else 1
    shape = (batch, *latent_shape(setting, width, height))
    live = LiveBytes()
    model = empty_part(source, "transformer", setting.dtype)
    vae = empty_part(source, "vae", torch.float32 if setting.dtype == torch.float16 else setting.dtype)
    layers = {name: model.get_submodule(name) for name in setting.targets}
    sizes = [sum(value.numel() for value in block.parameters()) for block in family.layout.blocks(model)]
    blocks = FakeBlocks(setting, live) if options.stream else None
    with fake_tensors(), torch.no_grad():
        with live:
            pairs = _adapter_pairs(setting, live, layers)
            with live.role("other"):
                waiting = [new(shape) for _ in range(batches)]
                texts = [stack_text([_own(text)] * batch) for _ in range(batches * passes)]
            own, latents = texts[0], new(shape, setting.dtype)
            sigma = new((batch,))
            if blocks is not None:
                flops, read = _streamed_step(
                    setting, live, blocks, pairs, latents, sigma, own, embedded, batches * passes
                )
            else:
                fake(model)
                live.tag_module(model)
                pairs.attach(model)
                live.reset_peaks()
                live.flops = 0
                with kernel(setting):
                    velocity(model, family, config, latents, sigma, own, embedded)
                flops = live.flops
                read = sum(value.numel() for value in model.parameters())
            del model, layers
        total = read
        decoding = LiveBytes()
        with decoding:
            fake(vae)
            decoding.tag_module(vae)
            with decoding.role("other"):
                kept = [new(shape) for _ in range(batches)]
            decoding.reset_peaks()
            with kernel(setting):
                family.decode(vae, new((1, *shape[1:]), setting.dtype))
        del waiting, texts, kept
    mapped = None if not options.stream else max(sizes)
    largest = max((live, decoding), key=lambda counter: counter.device_peak)
    host = loading(setting, "transformer", total, mapped) | {"pictures": pictures * 3 * height * width * 5}
    item = stored_dtype(source, "transformer").itemsize
    plan = finish(
        setting, largest, host, read_bytes=total * item * (int(steps) if options.stream else 1),
        disk_bytes=pictures * 3 * height * width,
        flops_forward=int(steps) * batches * passes * flops + pictures * decoding.flops,
        used=bool(options.prompts),
    )  # fmt: skip
    if text_plan.device_peak_bytes > plan.device_peak_bytes:
        plan = dataclasses.replace(plan, device_peak_bytes=text_plan.device_peak_bytes, device=text_plan.device,
                       host_peak_bytes=max(plan.host_peak_bytes, text_plan.host_peak_bytes))  # fmt: skip
    return plan


def _own(text: Text) -> Text:
    return {name: new(tuple(value.shape), value.dtype) for name, value in text.items()}


def _adapter_pairs(setting: Setting, live: LiveBytes, layers: Mapping[str, nn.Module]) -> FrozenAdapters:
    """The adapter as previews attach it: A and B of every layer, float32."""
    rank, pairs = setting.config.lora.rank, {}
    with live.role("adapters"):
        for name, layer in layers.items():
            outer, inner = layer.weight.shape
            pairs[name] = new((rank, inner)), new((outer, rank)), 1.0
    return FrozenAdapters.of_pairs(pairs)


def _streamed_step(
    setting: Setting,
    live: LiveBytes,
    blocks: FakeBlocks,
    pairs: FrozenAdapters,
    latents: torch.Tensor,
    sigma: torch.Tensor,
    text: Text,
    guidance: float,
    calls: int,
) -> tuple[int, int]:
    """(work of one call, values read) of one sampler step in which blocks visit one after the other."""
    layout, family, config = setting.source.family.layout, setting.source.family, setting.source.config("transformer")
    blocks.fill()
    live.reset_peaks()
    live.flops = 0
    seen: dict[str, int] = {}
    state: State | None = None
    others: list[torch.Tensor] = []
    read = sum(value.numel() for value in blocks.model.parameters())
    for index in range(setting.num_blocks):
        read += sum(value.numel() for value in blocks.empty[index].parameters())
        key = repr((blocks.kind(index), state and {name: tuple(value.shape) for name, value in state.items()}))
        if key in seen:
            live.flops += seen[key]
            continue
        before = live.flops
        with kernel(setting), blocks.block(index) as block:
            pairs.attach(block, layout.names(blocks.model)[index])
            inputs = family.forward_inputs(config, latents, sigma, text, guidance)
            state, _ = run_block(blocks.model, layout, index, state, inputs)
        if not others:  # the states of the other pictures wait on the device as well
            with live.role("other"):
                others = [torch.empty_like(value) for _ in range(calls - 1) for value in state.values()]
        for handles in [module._forward_hooks for module in block.modules()]:
            handles.clear()
        seen[key] = live.flops - before
    inputs = family.forward_inputs(config, latents, sigma, text, guidance)
    with kernel(setting):
        run_head(blocks.model, layout, state or {}, inputs)
    return live.flops, read
