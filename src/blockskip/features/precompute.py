"""Features of every group, block by block: one block's weights and one window of states are in memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from blockskip.families import Text
from blockskip.keys import key
from blockskip.loading.source import ModelSource
from blockskip.loading.transformer import Adapters, StreamedTransformer
from blockskip.memory import release
from blockskip.method.ahead import AheadOfBlocks, outputs_bytes
from blockskip.method.layout import State
from blockskip.method.skipping import Features, SkipRule, inner_features, run_block, span_features
from blockskip.method.split import Split
from blockskip.precision import compute
from blockskip.progress import progress, say
from blockskip.store.groups import GroupStore
from blockskip.store.int8 import quantize_tokens, relative_error


@dataclass(frozen=True)
class FeaturesArgument:
    """Everything that a group's features depend on; the text and pixel keys stand for what those depend on."""

    transformer: str
    adapters: tuple[str, ...]
    front: int
    tail: int
    inner: tuple[int, int]
    rule: str
    text: tuple[str, ...]
    pixels: str
    sigmas: tuple[float, ...]
    noise_seeds: tuple[int, ...]
    guidance: float
    family: str
    dtype: str
    stored: str = "auto"
    places: tuple[tuple[float, ...], ...] = ()


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
        places: (B, 4) float32 of its patches, where they keep their places in their pictures.
    """

    key: str
    latents: torch.Tensor
    noise: torch.Tensor
    sigma: torch.Tensor
    text: Text
    places: torch.Tensor | None = None


Write = Callable[[str, dict[str, torch.Tensor]], None]


@dataclass
class _Waiting:
    inputs: dict[str, object] | None = None
    front: State | None = None
    tail_input: torch.Tensor | None = None
    inner_input: State | None = None
    inner: Features = field(default_factory=dict)


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
    int8: bool = False,
) -> None:
    """Store the features of every group that the store lacks.

    Args:
        keys: of all groups.
        read: gives the group at a position in ``keys``.
        window_bytes: memory for the states, front features and inputs of spans of the groups that advance together.
        int8: store a byte a value; the first group's relative error is told.
    """
    missing = [index for index in dict(zip(keys, range(len(keys)), strict=True)).values() if not store.has(keys[index])]
    if not missing or not rule.stores(split):
        return
    transformer = StreamedTransformer(source, dtype, device, adapters)
    num_blocks = transformer.num_blocks
    stop = split.passes
    done = 0
    steps = len(missing) * (num_blocks if stop is None else stop)
    with progress(steps, "precompute") as bar, store.write_behind() as write:
        run = Window(transformer, source, split, rule, stop, dtype, device, guidance, int8)
        size = max(1, window_bytes // run.group_bytes(read(missing[0])))
        while done < len(missing):
            window = [read(index) for index in missing[done : done + size]]
            run(window, write, bar.advance)
            done += len(window)
    del run
    del transformer
    release()


@dataclass
class Window:
    """Groups that go through the blocks together."""

    transformer: StreamedTransformer
    source: ModelSource
    split: Split
    rule: SkipRule
    stop: int | None
    dtype: torch.dtype
    device: torch.device
    guidance: float
    int8: bool = False
    _told: bool = False

    def group_bytes(self, group: Input) -> int:
        """Memory that a group takes at most while it waits: its input, state, front features and a span's input."""
        model, layout = self.transformer.model, self.transformer.layout
        with (
            self.transformer.block(0), torch.no_grad(), compute(self.device, self.dtype),
            AheadOfBlocks(model, layout).kept() as ahead,
        ):  # fmt: skip
            state, _ = run_block(model, layout, 0, None, self._inputs(group))
        inner = self.split.inner[1] and self.rule.uses_tail
        kept = 1 + bool(self.split.front and self.rule.uses_front) + bool(self.split.tail) + bool(inner)
        given = _bytes([group.latents, group.noise, group.latents, *group.text.values()])  # and the noisy latents
        return kept * _bytes(state.values()) + given + outputs_bytes(ahead)

    def __call__(self, window: list[Input], write: Write, advance: Callable[[], None]) -> None:
        """Run a window through the blocks and store every group's features."""
        waiting, keep = [_Waiting() for _ in window], torch.device("cpu")
        tail = self.transformer.num_blocks - self.split.tail if self.split.tail else None
        start, end = self.split.inner if self.rule.uses_tail else (0, 0)

        def visit(block: int, index: int, state: State, entered: torch.Tensor) -> None:
            held = waiting[index]
            if block == tail:
                held.tail_input = entered.to(keep, copy=True)
            if block == self.split.front - 1 and self.rule.uses_front:
                held.front = {name: value.to(keep, copy=True).contiguous() for name, value in state.items()}
            if end and block == start - 1:
                held.inner_input = {name: value.to(keep, copy=True) for name, value in state.items()}
            if end and block == end - 1 and held.inner_input is not None:
                left = {name: value.to(keep) for name, value in state.items()}
                held.inner, held.inner_input = inner_features(self.rule, held.inner_input, left), None
            if block == 0:  # the later blocks need no text tokens, or read them themselves
                window[index].text = self.source.family.without_text_tokens(window[index].text)
                held.inputs = None
            advance()

        def inputs(index: int) -> dict[str, object]:
            held = waiting[index]
            given = held.inputs or self._inputs(window[index])
            held.inputs = given if self.device == keep else None  # a device of its own holds one group's at a time
            return given

        calls = [functools.partial(inputs, index) for index in range(len(window))]
        with torch.no_grad(), compute(self.device, self.dtype):
            for index, _, entered in self.transformer.run(calls, visit, stop=self.stop, keep=keep):
                self._write(write, window[index], waiting[index], entered.to(keep))
        if self.stop is not None:
            for group, held in zip(window, waiting, strict=True):
                self._write(write, group, held, None)

    def _inputs(self, group: Input) -> dict[str, object]:
        text = {name: value.to(self.device) for name, value in group.text.items()}
        drawn = (group.latents.to(self.device), group.noise.to(self.device), group.sigma.to(self.device))
        config = self.source.config("transformer")
        places = None if group.places is None else group.places.to(self.device)
        return self.source.family.noisy_inputs(config, *drawn, text, self.guidance, self.dtype, places)

    def _write(self, write: Write, group: Input, held: _Waiting, head: torch.Tensor | None) -> None:
        features = span_features(self.source.family.layout, self.rule, held.front, held.tail_input, head) | held.inner
        write(group.key, {name: value.contiguous() for name, value in self._packed(features).items()})
        held.front = held.tail_input = held.inputs = None
        held.inner = {}

    def _packed(self, features: Features) -> Features:
        if not self.int8:
            return features
        packed = quantize_tokens(features)
        if not self._told:
            self._told = True
            errors = [f"{name} {error:.2g}" for name, error in relative_error(features, packed).items()]
            say(f"Features are stored as int8; relative error in the first group: {', '.join(errors)}.")
        return packed


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(value.numel() * value.element_size() for value in tensors)
