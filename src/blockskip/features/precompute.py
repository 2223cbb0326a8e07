"""Features of every group, block by block: one block's weights and one window of states are in memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

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
from blockskip.store.waiting import OnDisk, on_disk
from blockskip.waiting import InMemory, Waiting


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


HOST = torch.device("cpu")
#: What of a group's features waits until it is whole.
KEPT = ("front", "tail input", "inner")
Write = Callable[[str, dict[str, torch.Tensor]], None]


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
    waiting_folder: Path | None = None,
    read_ahead: bool = True,
) -> int:
    """Store the features of every group that the store lacks; returns the bytes of the files of waiting states.

    Args:
        keys: of all groups.
        read: gives the group at a position in ``keys``.
        window_bytes: of the states, front features and inputs of spans of the groups that advance together.
        int8: store a byte a value; the first group's relative error is told.
        waiting_folder: where the window waits, but for one group; default: in memory.
        read_ahead: whether the next block is copied to a device of its own while one computes.

    Raises:
        RunError: a disk is full, or a file cannot be written.
    """
    missing = [index for index in dict(zip(keys, range(len(keys)), strict=True)).values() if not store.has(keys[index])]
    if not missing or not rule.stores(split):
        return 0
    place: AbstractContextManager[Waiting] = nullcontext(InMemory(HOST))
    if waiting_folder is not None:
        place = on_disk(waiting_folder)
    transformer = StreamedTransformer(source, dtype, device, adapters, read_ahead=read_ahead)
    num_blocks = transformer.num_blocks
    stop = split.passes
    done = 0
    steps = len(missing) * (num_blocks if stop is None else stop)
    with place as waiting, progress(steps, "precompute") as bar, store.write_behind() as write:
        run = Window(transformer, source, split, rule, stop, dtype, device, guidance, int8, waiting)
        size = max(1, window_bytes // run.group_bytes(read(missing[0])))
        while done < len(missing):
            window = missing[done : done + size]
            for position, index in enumerate(window):
                waiting.put(position, "input", vars(read(index)))
            run([keys[index] for index in window], write, bar.advance)
            done += len(window)
    del run
    del transformer
    release()
    return waiting.peak_bytes if isinstance(waiting, OnDisk) else 0


@dataclass
class Window:
    """Groups that go through the blocks together.

    Args:
        waiting: where everything of a group waits; its ``Input`` is there, as a dict named "input", when it is run.
    """

    transformer: StreamedTransformer
    source: ModelSource
    split: Split
    rule: SkipRule
    stop: int | None
    dtype: torch.dtype
    device: torch.device
    guidance: float
    int8: bool = False
    waiting: Waiting = field(default_factory=lambda: InMemory(HOST))
    _told: bool = False

    def group_bytes(self, group: Input) -> int:
        """Bytes that a group takes at most while it waits: its input, state, front features and a span's input."""
        model, layout = self.transformer.model, self.transformer.layout
        with (
            self.transformer.block(0), torch.no_grad(), compute(self.device, self.dtype),
            AheadOfBlocks(model, layout).kept() as ahead,
        ):  # fmt: skip
            state, _ = run_block(model, layout, 0, None, self._inputs(group))
        given = _bytes([group.latents, group.noise, group.latents, *group.text.values()])  # and the noisy latents
        return (1 + self.kept_states) * _bytes(state.values()) + given + outputs_bytes(ahead)

    @property
    def kept_states(self) -> int:
        """How many states wait beside the one that goes from block to block: of a front, a tail, a run inside."""
        inner = self.split.inner[1] and self.rule.uses_tail
        return bool(self.split.front and self.rule.uses_front) + bool(self.split.tail) + bool(inner)

    def __call__(self, keys: Sequence[str], write: Write, advance: Callable[[], None]) -> None:
        """Run a window through the blocks and store every group's features.

        Args:
            keys: of the groups, which wait under the numbers of their keys.
        """
        waiting = self.waiting
        tail = self.transformer.num_blocks - self.split.tail if self.split.tail else None
        start, end = self.split.inner if self.rule.uses_tail else (0, 0)
        made: dict[int, dict[str, object]] = {}  # a device of its own, or a disk, holds one group's at a time
        holds = self.device == HOST and isinstance(waiting, InMemory)

        def visit(block: int, index: int, state: State, entered: torch.Tensor) -> None:
            if block == tail:
                waiting.put(index, "tail input", entered.to(HOST, copy=True))
            if block == self.split.front - 1 and self.rule.uses_front:
                front = {name: value.to(HOST, copy=True).contiguous() for name, value in state.items()}
                waiting.put(index, "front", front)
            if end and block == start - 1:
                before = {name: value.to(HOST, copy=True) for name, value in state.items()}
                waiting.put(index, "inner input", before)
            if end and block == end - 1:
                left = {name: value.to(HOST) for name, value in state.items()}
                waiting.put(index, "inner", inner_features(self.rule, waiting.take(index, "inner input"), left))
            if block == 0:  # the later blocks need no text tokens, or read them themselves
                given = waiting.take(index, "input")
                waiting.put(index, "input", given | {"text": self.source.family.without_text_tokens(given["text"])})
                made.pop(index, None)
            advance()

        def inputs(index: int) -> dict[str, object]:
            given = made.get(index) or self._inputs(Input(**waiting.get(index, "input")))
            if holds:
                made[index] = given
            return given

        calls = [functools.partial(inputs, index) for index in range(len(keys))]
        with torch.no_grad(), compute(self.device, self.dtype):
            for index, _, entered in self.transformer.run(calls, visit, stop=self.stop, keep=HOST, waiting=waiting):
                made.pop(index, None)
                self._write(write, keys[index], index, entered.to(HOST))
        if self.stop is not None:
            for index, key_ in enumerate(keys):
                self._write(write, key_, index, None)

    def _inputs(self, group: Input) -> dict[str, object]:
        text = {name: value.to(self.device) for name, value in group.text.items()}
        drawn = (group.latents.to(self.device), group.noise.to(self.device), group.sigma.to(self.device))
        config = self.source.config("transformer")
        places = None if group.places is None else group.places.to(self.device)
        return self.source.family.noisy_inputs(config, *drawn, text, self.guidance, self.dtype, places)

    def _write(self, write: Write, key_: str, index: int, head: torch.Tensor | None) -> None:
        held = {name: self.waiting.take(index, name) for name in ("input", "state", "ahead", *KEPT)}
        front, tail_input, inner = (held[name] for name in KEPT)
        features = span_features(self.source.family.layout, self.rule, front, tail_input, head) | (inner or {})
        write(key_, {name: value.contiguous() for name, value in self._packed(features).items()})

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
