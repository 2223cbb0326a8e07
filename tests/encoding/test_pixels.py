"""Patches: what is stored is what the pipeline's own decoder turns back, drawn with the sample's noise and no other."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from blockskip.data.pictures import read_pictures
from blockskip.data.schedule import Group, Schedule, make_schedule, sample_pixels
from blockskip.encoding.pixels import pixel_keys, store_pixels
from blockskip.loading.source import ModelSource
from blockskip.settings import from_flat
from blockskip.store.groups import GroupStore

CPU = torch.device("cpu")


def schedule_of(photos: Path, **changes: Any) -> Schedule:
    values = {"train.steps": 3, "train.gradient_accumulation_steps": 2, "train.batch_size": 2}
    config = from_flat(values | {name.replace("__", "."): value for name, value in changes.items()})
    pictures = read_pictures(photos, "a dog", resolution=32, full_resolution=64)
    return make_schedule(
        config, pictures, resolution=32, full_resolution=64, stride=8, distribution="uniform", shift=1.0
    )


def encode(
    source: ModelSource, schedule: Schedule, folder: Path, groups: Sequence[Group] | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:  # fmt: skip
    store = GroupStore(folder)
    keys = store_pixels(source, schedule, groups or schedule.groups, dtype, CPU, store)
    return [store.read(key)["latents"] for key in keys]


def mirrored(group: Group) -> Group:
    return replace(group, samples=tuple(replace(sample, flip=not sample.flip) for sample in group.samples))


def test_what_is_encoded_is_decoded_again(source: ModelSource, photos: Path, tmp_path: Path) -> None:
    """Latents lie around the posterior's mean with its deviation, and are decoded to what the mean is decoded to.

    That the family's own two functions are the pipeline's is held by the tests of the families.
    """
    schedule, family = schedule_of(photos), source.family
    vae, drawn = source.load("vae"), list[torch.Tensor]()
    with torch.no_grad():
        for group, latents in zip(schedule.groups, encode(source, schedule, tmp_path), strict=True):
            pixels = sample_pixels(schedule, group)
            mean = family.encode_pixels(vae, pixels, torch.zeros_like(latents))
            spread = family.encode_pixels(vae, pixels, torch.ones_like(latents)) - mean
            if not spread.any():  # an autoencoder whose latents are no distribution
                assert torch.allclose(latents, mean, rtol=1e-6, atol=1e-6)
                continue
            drawn.append(((latents - mean) / spread).flatten())
            found, exact = family.decode(vae, latents), family.decode(vae, mean)
            assert (found - exact).norm() < 0.7 * (found - exact.flip(0)).norm()  # nearer than the other sample's
    if drawn:
        noise = torch.cat(drawn)
        assert 0.9 < float(noise.std()) < 1.1
        assert abs(float(noise.mean())) < 0.1


def test_shapes_and_dtypes(source: ModelSource, photos: Path, tmp_path: Path) -> None:
    schedule = schedule_of(photos, patches__shape="picture")
    factor = source.family.vae_factor(source.config("vae"))
    channels = source.family.latent_channels(source.config("vae"))
    sizes = set()
    for dtype in (torch.float32, torch.bfloat16):
        found = encode(source, schedule, tmp_path / str(dtype), dtype=dtype)
        for group, latents in zip(schedule.groups, found, strict=True):
            assert latents.dtype == torch.float32
            assert latents.shape == (2, channels, group.size[1] // factor, group.size[0] // factor)
            assert bool(torch.isfinite(latents).all())
            sizes.add(group.size)
    assert len(sizes) > 1


def test_a_sample_decides_alone(source: ModelSource, photos: Path, tmp_path: Path) -> None:
    """A group's latents are the same bits whenever and with whatever they are encoded."""
    schedule = schedule_of(photos)
    together = encode(source, schedule, tmp_path / "a")
    for index in (3, 0):
        (alone,) = encode(source, schedule, tmp_path / "b", [schedule.groups[index]])
        assert torch.equal(alone, together[index])
    backwards = encode(source, schedule, tmp_path / "c", schedule.groups[::-1])
    assert all(map(torch.equal, backwards[::-1], together))
    assert len({tuple(latents.flatten().tolist()) for latents in together}) == len(together)


def test_mirrored_samples(source: ModelSource, photos: Path, tmp_path: Path) -> None:
    schedule = schedule_of(photos)
    group = mirrored(schedule.groups[0])
    assert torch.equal(sample_pixels(schedule, group), sample_pixels(schedule, schedule.groups[0]).flip(-1))
    (plain,) = encode(source, schedule, tmp_path, [schedule.groups[0]])
    (turned,) = encode(source, schedule, tmp_path, [group])
    assert not torch.allclose(plain, turned, atol=0.1)


def test_the_posterior_is_drawn_by_the_sample(flux: ModelSource, photos: Path, tmp_path: Path) -> None:
    schedule = schedule_of(photos)
    group = schedule.groups[0]
    other = replace(group, samples=tuple(replace(s, noise_seed=s.noise_seed + 1) for s in group.samples))
    (one,), (two,) = encode(flux, schedule, tmp_path, [group]), encode(flux, schedule, tmp_path, [other])
    torch.manual_seed(5)
    (again,) = encode(flux, schedule, tmp_path / "again", [group])
    assert torch.equal(one, again)
    assert not torch.equal(one, two)
    assert float((one - two).norm() / one.norm()) < 0.5


def test_only_what_is_missing_is_encoded(
    source: ModelSource, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = schedule_of(photos)
    store = GroupStore(tmp_path)
    first = store_pixels(source, schedule, schedule.groups[:3], torch.float32, CPU, store)
    loads: list[str] = []
    load = ModelSource.load
    monkeypatch.setattr(
        ModelSource, "load", lambda source, part, *args: loads.append(part) or load(source, part, *args)
    )
    written: list[str] = []
    write = GroupStore.write
    monkeypatch.setattr(GroupStore, "write", lambda store, key, *args: written.append(key) or write(store, key, *args))
    keys = store_pixels(source, schedule, schedule.groups, torch.float32, CPU, store)
    assert keys[:3] == first
    assert written == keys[3:]
    assert loads == ["vae"]
    assert store_pixels(source, schedule, schedule.groups, torch.float32, CPU, store) == keys
    twice = [*schedule.groups, *schedule.groups]
    assert store_pixels(source, schedule, twice, torch.float32, CPU, store) == keys * 2
    assert loads == ["vae"]  # with nothing to do the autoencoder is not loaded


def test_keys_follow_what_the_latents_depend_on(flux: ModelSource, sana: ModelSource, photos: Path) -> None:
    schedule = schedule_of(photos)
    group = schedule.groups[0]
    sample, rest = group.samples[0], group.samples[1:]

    def one(
        group: Group = group, dtype: torch.dtype = torch.float32, source: ModelSource = flux, device: str = "cpu"
    ) -> str:
        (found,) = pixel_keys(source, schedule, [group], dtype, torch.device(device))
        return found

    def changed(**changes: Any) -> Group:
        return replace(group, samples=(replace(sample, **changes), *rest))

    left, top, width, height = sample.box
    found = [
        one(), one(dtype=torch.bfloat16), one(source=sana), one(device="cuda"), one(changed(flip=not sample.flip)),
        one(changed(box=(left, top, width - 8, height))), one(changed(noise_seed=1)), one(mirrored(group)),
        one(changed(picture=(sample.picture + 1) % 5)), one(replace(group, size=(40, 32))),
        one(replace(group, samples=group.samples[::-1])), one(replace(group, samples=group.samples[:1])),
    ]  # fmt: skip
    assert len(set(found)) == len(found)
    # What the autoencoder never sees does not matter.
    same = changed(caption="another", weight=2.0, sigma=0.25)
    assert one(same) == one(replace(group, index=7)) == one()
