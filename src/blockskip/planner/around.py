"""What the plans of all phases share: the surroundings of a kernel, its tensors, and what the host holds beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch

from blockskip.families import Text, stack_text
from blockskip.planner.autocast import like_device
from blockskip.planner.counting import LiveBytes
from blockskip.planner.parts import stored_dtype
from blockskip.planner.plan import PhasePlan, counted
from blockskip.planner.setting import Setting
from blockskip.precision import compute

CPU = torch.device("cpu")
#: Host memory of a phase that no tensor holds: pages of libraries' code that are run for the first time, threads, the
#: interpreter's objects and what allocators keep. Measured for both built-in models: 16 to 56 MiB
#: (``python -m benchmarks.memory_measured``).
RUNTIME = 32 * 2**20
#: Where the patches of a group lie in their pictures, (B, 4); None where each is as a picture of its own.
Places = torch.Tensor | None


def bytes_of(tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes of named tensors; an expanded tensor counts by its storage."""
    return sum(value.untyped_storage().nbytes() for value in tensors.values())


@contextlib.contextmanager
def kernel(setting: Setting) -> Iterator[None]:
    """The surroundings of a kernel on the planned device."""
    with like_device(setting.device), compute(CPU, setting.dtype):
        yield


def new(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor without values."""
    return torch.empty(shape, dtype=dtype)


def new_text(text: Text, batch: int) -> Text:
    """The text of a batch, as new tensors shaped like that of one prompt."""
    own = {name: new(tuple(value.shape), value.dtype) for name, value in text.items()}
    return stack_text([own] * batch)


def latent_shape(setting: Setting, width: int, height: int) -> tuple[int, int, int]:
    """(C, h, w) of the latents of a picture in pixels."""
    vae = setting.source.config("vae")
    factor = setting.source.family.vae_factor(vae)
    return setting.source.family.latent_channels(vae), height // factor, width // factor


def new_group(setting: Setting, text: Text) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Text, Places]:
    """Latents, noise, noise levels and text of a group of samples, and their patches' places if they keep them."""
    batch = setting.config.train.batch_size
    shape = (batch, *latent_shape(setting, *setting.size))
    places = new((batch, 4)) if setting.config.patches.positions == "picture" else None
    return new(shape), new(shape), new((batch,)), new_text(text, batch), places


def reading(setting: Setting, part: str, mapped: int, converted: int) -> dict[str, int]:
    """Host memory that weights take while they are read, beside the tensors that are counted on the device.

    On the CPU, weights of the stored dtype are the mapped file itself, and others are counted copies beside it. A
    device of its own gets its copies from the file, or from copies in the dtype of computation where the stored one
    differs: ``from_pretrained`` makes those of a whole part before any of it moves.

    Args:
        mapped: values of the file that are in memory at once.
        converted: values that are in memory in the dtype of computation at once, on the host.
    """
    stored = stored_dtype(setting.source, part)
    if stored == setting.dtype:
        return {} if setting.pool else {"weights file": mapped * stored.itemsize}
    copies = {} if setting.pool else {"converted weights": converted * setting.dtype.itemsize}
    return {"weights file": mapped * stored.itemsize} | copies


def finish(
    setting: Setting,
    live: LiveBytes,
    host: Mapping[str, int],
    before: Mapping[str, int] | None = None,
    weights: int = 0,
    **others: object,
) -> PhasePlan:
    """The phase; where device and host are one memory, the host holds both.

    Args:
        host: what the host holds beside the device while the phase computes, in bytes by name.
        before: what it holds while weights are read, if that is over when the phase computes.
        weights: bytes of the weights that are then on the device.
    """
    host = {**host, "runtime": RUNTIME}
    computing, starting = sum(host.values()), RUNTIME + sum((before or {}).values())
    if setting.pool:
        computing, starting = computing + live.pool_peak, starting + weights
    held = {name: max(size, host.get(name, 0)) for name, size in (before or {}).items()}
    return counted(live, host_peak_bytes=max(computing, starting), host={**host, **held}, **others)
