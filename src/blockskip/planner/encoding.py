"""What encoding takes: prompts by one text encoder after the other, patches by the autoencoder."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from blockskip.families import Text
from blockskip.loading.encoders import TOGETHER, layer_names
from blockskip.planner.around import bytes_of, finish, kernel, latent_shape, new, reading
from blockskip.planner.counting import LiveBytes
from blockskip.planner.fakes import visiting_layers
from blockskip.planner.parts import empty_autoencoder, empty_part, fake, fake_tensors, stored_dtype
from blockskip.planner.plan import PhasePlan
from blockskip.planner.setting import Setting


@dataclass(frozen=True)
class Encoder:
    """What a text encoder takes.

    Args:
        plan: for one prompt, without its text.
        waiting: bytes that each further prompt holds where several share the reading of a layer.
        read_bytes: of its file.
    """

    plan: PhasePlan
    waiting: int
    read_bytes: int


def text_encoders(setting: Setting) -> tuple[list[Encoder], Text]:
    """Every text encoder on its own; the conditioning tensors of one prompt come with them."""
    source, family = setting.source, setting.source.family
    text: Text = {}
    found = []
    counts = family.token_counts(setting.text_length)
    fakes = fake_tensors()
    for _, part in source.text_parts:
        live = LiveBytes()
        encoder = empty_part(source, part, setting.dtype)
        longest = getattr(encoder.config, "max_position_embeddings", None)
        total = _values(encoder)
        names = layer_names(encoder) if setting.config.model.stream_text_encoders else []
        layers = [_values(encoder.get_submodule(name)) for name in names]
        at_once = max([total - sum(layers), *layers])
        with fakes, live, _placed(encoder, names, live) as waiting, torch.no_grad(), kernel(setting):
            live.reset_peaks()
            weights = live.now["weights"]
            ids = {
                name: torch.ones(1, min(count, longest or count), dtype=torch.int64) for name, count in counts.items()
            }
            text |= family.encode_text({part: encoder}, ids)
        read = reading(setting, part, at_once, at_once)
        plan = finish(
            setting, live, read if names else {}, {} if names else read, weights, flops_forward=live.flops
        )  # fmt: skip
        found.append(Encoder(plan, max(waiting, default=0), total * stored_dtype(source, part).itemsize))
        del encoder
    with fakes:
        text = family.join_text(source.config("transformer"), text, setting.text_length)
    return found, text


def prompts_encoded(setting: Setting, encoders: list[Encoder], text: Text, prompts: int) -> PhasePlan:
    """A number of prompts through the encoders; the texts stay in host memory."""
    plans, texts = [], prompts * bytes_of(text)
    for one in encoders:  # the other prompts that share the reading of a layer wait ahead of it, or of the next one
        more = (min(TOGETHER, prompts) - 1) * one.waiting
        device = one.plan.device | {"activations": one.plan.device["activations"] + more}
        plans.append(dataclasses.replace(
            one.plan, device_peak_bytes=one.plan.device_peak_bytes + more, device=device,
            host_peak_bytes=one.plan.host_peak_bytes + (more if setting.pool else 0),
        ))  # fmt: skip
    largest = max(plans, key=lambda plan: (plan.device_peak_bytes, plan.host_peak_bytes))
    return dataclasses.replace(
        largest, host_peak_bytes=max(plan.host_peak_bytes for plan in plans) + texts,
        host=largest.host | {"encoded text": texts}, read_bytes=sum(one.read_bytes for one in encoders),
        flops_forward=prompts * sum(plan.flops_forward for plan in plans),
    )  # fmt: skip


def encode_text(setting: Setting) -> tuple[PhasePlan, Text]:
    """The phase of the run, which stores every caption's text; the conditioning tensors of one prompt come with it."""
    encoders, text = text_encoders(setting)
    return text_phase(setting, encoders, text), text


def text_phase(setting: Setting, encoders: list[Encoder], text: Text) -> PhasePlan:
    """The phase of the run, from what its encoders take."""
    plan = prompts_encoded(setting, encoders, text, setting.captions)
    return dataclasses.replace(plan, disk_bytes=setting.captions * bytes_of(text))


@contextlib.contextmanager
def _placed(encoder: nn.Module, layers: list[str], live: LiveBytes) -> Iterator[list[int]]:
    if layers:
        with visiting_layers(encoder, layers, live) as waiting:
            yield waiting
        return
    fake(encoder)
    live.tag_module(encoder)
    yield []


def encode_pictures(setting: Setting) -> PhasePlan:
    """The autoencoder, without its decoder, over one group at a time."""
    source, config = setting.source, setting.config
    batch, (width, height) = config.train.batch_size, setting.size
    vae = empty_autoencoder(source, "encoder", setting.dtype)
    with fake_tensors():
        live = LiveBytes()
        with live:
            fake(vae)
            live.tag_module(vae)
            live.reset_peaks()
            weights = live.now["weights"]
            shape = (batch, *latent_shape(setting, width, height))
            with torch.no_grad(), kernel(setting):
                pixels = new((batch, 3, height, width), setting.dtype)
                latents = source.family.encode_pixels(vae, pixels, new(shape)).float()
        stored = bytes_of({"latents": latents})
        total = _values(vae)
    full = config.data.full_resolution or height
    host = {"pictures": 3 * full * full * 4}
    if not setting.pool or setting.dtype != torch.float32:  # else they are the autoencoder's input itself
        host["pixels"] = batch * 3 * height * width * 4
    return finish(
        setting, live, host, reading(setting, "vae", total, total), weights, disk_bytes=setting.groups * stored,
        read_bytes=total * stored_dtype(source, "vae").itemsize, flops_forward=setting.groups * live.flops,
    )  # fmt: skip


def _values(module: nn.Module) -> int:
    return sum(value.numel() for value in module.parameters())
