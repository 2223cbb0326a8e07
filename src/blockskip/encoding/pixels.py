"""Patches to latents: the autoencoder over every group of the schedule, one stored entry a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from blockskip.data.noise import posterior_noise
from blockskip.data.pixels import PictureCache
from blockskip.data.schedule import Group, Schedule, sample_pixels
from blockskip.keys import key
from blockskip.loading.autoencoder import load_autoencoder
from blockskip.loading.source import ModelSource
from blockskip.loading.weights import Weights
from blockskip.memory import release
from blockskip.precision import compute
from blockskip.progress import progress
from blockskip.store.groups import GroupStore


@dataclass(frozen=True)
class PatchArgument:
    """Everything that one patch depends on before the autoencoder."""

    picture: str
    scaled: tuple[int, int]
    box: tuple[int, int, int, int]
    flip: bool
    noise_seed: int


@dataclass(frozen=True)
class PixelsArgument:
    """Everything that a group's latents depend on."""

    patches: tuple[PatchArgument, ...]
    size: tuple[int, int]
    family: str
    vae: str
    dtype: str


def pixel_keys(
    source: ModelSource, schedule: Schedule, groups: Sequence[Group], dtype: torch.dtype, device: torch.device
) -> list[str]:
    """The store's key of each group."""
    vae = Weights(source.part_folder("vae")).identity()
    keys = []
    for group in groups:
        patches = tuple(
            PatchArgument(
                schedule.pictures[sample.picture].sha256, schedule.pictures[sample.picture].scaled, sample.box,
                sample.flip, sample.noise_seed,
            )
            for sample in group.samples
        )  # fmt: skip
        keys.append(
            key("pixels", PixelsArgument(patches, group.size, source.family.name, vae, f"{dtype} on {device.type}"))
        )
    return keys


def store_pixels(
    source: ModelSource,
    schedule: Schedule,
    groups: Sequence[Group],
    dtype: torch.dtype,
    device: torch.device,
    store: GroupStore,
) -> list[str]:
    """Encode the groups that the store lacks; returns each group's key. Stored: ``latents`` (B, C, h, w) float32."""
    keys = pixel_keys(source, schedule, groups, dtype, device)
    missing = {name: group for name, group in zip(keys, groups, strict=True) if not store.has(name)}
    if not missing:
        return keys
    family, config = source.family, source.config("vae")
    factor, channels = family.vae_factor(config), family.latent_channels(config)
    vae = load_autoencoder(source, "encoder", dtype, device)
    load = PictureCache()
    with progress(len(missing), "encode pictures") as bar:
        for name, group in missing.items():
            pixels = sample_pixels(schedule, group, load).to(device, dtype)
            shape = (channels, group.size[1] // factor, group.size[0] // factor)
            noise = posterior_noise(group.samples, shape).to(device)
            with torch.no_grad(), compute(device, dtype):
                latents = family.encode_pixels(vae, pixels, noise)
            store.write(name, {"latents": latents.float().to("cpu").contiguous()})
            bar.advance()
    del vae
    release()
    return keys
