"""Features of every group, block by block: one block's weights and one window of states are in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from blockskip.families import Text
from blockskip.keys import key
from blockskip.loading.source import ModelSource
from blockskip.loading.transformer import Adapters, StreamedTransformer
from blockskip.memory import release
from blockskip.method.layout import State
from blockskip.method.skipping import SkipRule, span_features
from blockskip.method.split import Split
from blockskip.precision import compute
from blockskip.progress import progress
from blockskip.store.groups import GroupStore


@dataclass(frozen=True)
class FeaturesArgument:
    """Everything that a group's features depend on; the text and pixel keys stand for what those depend on."""

    transformer: str
    adapters: tuple[str, ...]
    front: int
    tail: int
    rule: str
    text: tuple[str, ...]
    pixels: str
    sigmas: tuple[float, ...]
    noise_seeds: tuple[int, ...]
    guidance: float
    dtype: str


def features_key(argument: FeaturesArgument) -> str:
    """The store's key of a group's features."""
    return key("features", argument)


@dataclass
class Input:
    """One group as the transformer takes it.

    Args:
        key: of its features.
        latents, noise: (B, C, h, w) float32.
        sigma: (B,) float32.
        text: of its captions.
    """

    key: str
    latents: torch.Tensor
    noise: torch.Tensor
    sigma: torch.Tensor
    text: Text


@dataclass
class _Waiting:
    front: State | None = None
    tail_input: torch.Tensor | None = None
    size: int = field(default=0)


def precompute(
    source: ModelSource,
    split: Split,
    rule: SkipRule,
    keys: Sequence[str],
    read: Callable[[int], Input],
    store: GroupStore,
    *,
    window_bytes: int,
    dtype: torch.dtype,
    device: torch.device,
    guidance: float,
    adapters: Adapters | None = None,
) -> None:
    """Store the features of every group that the store lacks.

    Args:
        keys: of all groups.
        read: gives the group at a position in ``keys``.
        window_bytes: memory for the states, front features and tail inputs of the groups that advance together.
    """
    missing = [index for index in dict(zip(keys, range(len(keys)), strict=True)).values() if not store.has(keys[index])]
    if not missing or not ((split.front and rule.uses_front) or split.tail):
        return
    transformer = StreamedTransformer(source, dtype, device, adapters)
    num_blocks = transformer.num_blocks
    stop = None if split.tail else split.front
    done = 0
    with progress(len(missing) * (num_blocks if stop is None else stop), "precompute") as bar:
        size = 1  # the first group tells how much memory a group takes
        while done < len(missing):
            window = [read(index) for index in missing[done : done + size]]
            group_bytes = _run_window(
                transformer, source, split, rule, window, store, stop, dtype, device, guidance, bar.advance
            )
            done += len(window)
            size = max(1, window_bytes // max(1, group_bytes))
    del transformer
    release()


def _run_window(
    transformer: StreamedTransformer,
    source: ModelSource,
    split: Split,
    rule: SkipRule,
    window: list[Input],
    store: GroupStore,
    stop: int | None,
    dtype: torch.dtype,
    device: torch.device,
    guidance: float,
    advance: Callable[[], None],
) -> int:
    """Features of one window of groups; returns the bytes that a group held at most."""
    family, config = source.family, source.config("transformer")
    waiting = [_Waiting() for _ in window]
    keep = torch.device("cpu")

    def call(index: int) -> dict[str, object]:
        group = window[index]
        text = group.text if blocks_run == 0 else family.without_text_tokens(group.text)
        moved = {name: value.to(device) for name, value in text.items()}
        drawn = (group.latents.to(device), group.noise.to(device), group.sigma.to(device))
        return family.noisy_inputs(config, *drawn, moved, guidance, dtype)

    blocks_run = 0

    def visit(block: int, index: int, state: State, entered: torch.Tensor) -> None:
        nonlocal blocks_run
        held = waiting[index]
        if split.tail and block == num_blocks - split.tail:
            held.tail_input = entered.to(keep, copy=True)
        if block == split.front - 1 and rule.uses_front:
            held.front = {name: value.to(keep, copy=True).contiguous() for name, value in state.items()}
        held.size = max(held.size, _bytes(state.values()) + _bytes((held.front or {}).values())
                        + (0 if held.tail_input is None else _bytes([held.tail_input])))  # fmt: skip
        if index == len(window) - 1:
            blocks_run = block + 1
        advance()

    num_blocks = transformer.num_blocks
    calls = [(lambda index=index: call(index)) for index in range(len(window))]
    with torch.no_grad(), compute(device, dtype):
        for index, _, entered in transformer.run(calls, visit, stop=stop, keep=keep):
            _write(store, window[index], source, rule, waiting[index], entered.to(keep))
    if stop is not None:
        for group, held in zip(window, waiting, strict=True):
            _write(store, group, source, rule, held, None)
    return max(held.size for held in waiting)


def _write(
    store: GroupStore, group: Input, source: ModelSource, rule: SkipRule, held: _Waiting, head: torch.Tensor | None
) -> None:
    features = span_features(source.family.layout, rule, held.front, held.tail_input, head)
    store.write(group.key, {name: value.contiguous() for name, value in features.items()})
    held.front = held.tail_input = None


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(value.numel() * value.element_size() for value in tensors)
