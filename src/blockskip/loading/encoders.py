"""A text encoder with the weights of one layer in memory at a time; its output is that of the whole one, bit for bit.

    in memory all the time   embeddings, norms, poolers: what is in no list of layers
    read, used, dropped      encoder.block.0 | encoder.block.1 | ...      (vision towers: never used, never read)

``from_pretrained`` loads the encoder with its lists of layers emptied, and the very function that it loads with then
fills one layer after the other from the safetensors files. So names (with or without the base model's prefix, old
ones), dtypes (T5's ``wo``, float32 beside float16) and conversions are what transformers makes of them.

Its own way of doing this, a ``device_map`` with ``disk``, was tried: it casts ``wo`` to float16, reads the whole file
through memory while loading when the dtype is not the stored one, and reads every layer anew for each prompt.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from blockskip.errors import UserError
from blockskip.loading.ahead import Expecting
from blockskip.loading.source import ModelSource
from blockskip.loading.turns import Turns
from blockskip.loading.weights import Weights
from blockskip.memory import trim

#: Prompts that go through a layer while it is in memory; each holds its own activations.
TOGETHER = 4

T = TypeVar("T")


def layer_names(model: nn.Module) -> list[str]:
    """Full names of the layers of a text encoder that are streamed: the members of its outermost lists of modules.

    Args:
        model: the whole encoder; its parameters may be on the meta device or fake.
    """
    return [f"{name}.{index}" for name, layers in _lists(model) for index in range(len(layers))]


def _lists(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.ModuleList]]:
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            yield prefix + name, child
        else:
            yield from _lists(child, f"{prefix}{name}.")


def stored_layers(layers: Sequence[str], stored: Collection[str]) -> dict[str, list[str]]:
    """The tensors of each layer by their names in the files, which may call a list of layers otherwise.

        language_model.layers.3 of the model  ->  model.layers.3.* | language_model.model.layers.3.* of the files

    A list is the one of the files that has the longest end of its name, and of such the most parts of it.

    Args:
        layers: full names in the model (``layer_names``).
        stored: names of the tensors in the files.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for name in stored:
        if match := re.match(r"(.+?)\.(\d+)\.", name):
            found.setdefault((match[1], match[2]), []).append(name)

    def alike(list_name: str, other: str) -> tuple[int, int]:
        parts, others = list_name.split("."), other.split(".")
        pairs = zip(reversed(parts), reversed(others), strict=False)
        return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs))), len({*parts} & {*others})

    named: dict[str, list[str]] = {}
    for layer in layers:
        list_name, _, number = layer.rpartition(".")
        same = max((other for other, _ in found), key=partial(alike, list_name), default="")
        named[layer] = found.get((same, number), [])
    return named


@dataclass
class _Loaded:
    """How an encoder was loaded.

    Args:
        lists: its emptied lists, with their layers on the meta device.
        read: fills what is in the ``state_dict`` of a model; returns what transformers says about it.
        info: what it said about the rest.
    """

    lists: list[tuple[nn.ModuleList, list[nn.Module]]] = field(default_factory=list)
    read: Callable[[nn.Module], Any] | None = None
    info: Any = None


@contextmanager
def _without_layers() -> Iterator[_Loaded]:
    """Let ``from_pretrained`` of transformers leave out the layers of the model that it loads."""
    original, loaded = PreTrainedModel._load_pretrained_model, _Loaded()

    def load(model: nn.Module, state_dict: Any, files: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        loaded.lists = [(layers, list(layers)) for _, layers in _lists(model)]
        for layers, _ in loaded.lists:
            del layers[:]
        loaded.read = lambda model: original(model, state_dict, files, config)[0]
        found = original(model, state_dict, files, config, *args, **kwargs)
        loaded.info = found[0]
        return found

    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # the layers in the file are no surprise
    PreTrainedModel._load_pretrained_model = staticmethod(load)
    try:
        yield loaded
    finally:
        PreTrainedModel._load_pretrained_model = staticmethod(original)
        transformers_logging.set_verbosity(verbosity)


class StreamedEncoder:
    """A frozen text encoder in eval mode whose layers are on the meta device, except one that is being used.

    Args:
        part: of the pipeline, ``text_encoder_2`` for example; a model of transformers.
        dtype: of the weights, as for ``source.load``.
        device: where it computes.

    Raises:
        UserError: the files lack a tensor, or hold one of another shape.
    """

    def __init__(self, source: ModelSource, part: str, dtype: torch.dtype, device: torch.device) -> None:
        self._folder, self._device = source.part_folder(part), device
        with _without_layers() as loaded:
            self.model: nn.Module = source.load(part, dtype).to(device)
        assert loaded.read is not None
        self._read, self._held = loaded.read, ""
        self._check(loaded.info)
        for layers, left_out in loaded.lists:
            layers.extend(left_out)
        self.model.requires_grad_(False).eval()
        self._turns, self._layers, files = Turns(), layer_names(self.model), Weights(self._folder)
        self._stored, self._expecting = stored_layers(self._layers, files.files), Expecting(files)
        for name in self._layers:
            self.model.get_submodule(name).register_forward_pre_hook(partial(self._before, name))

    def run(self, calls: Sequence[Callable[[], T]]) -> Iterator[T]:
        """What calls return that use ``model``, in their order; a few at a time share the reading of a layer.

        Each call runs in a thread of its own, never two at once; it enters ``no_grad`` and autocast itself.
        """
        for start in range(0, len(calls), TOGETHER):
            yield from self._turns.run(calls[start : start + TOGETHER])
        self._drop()

    def _before(self, name: str, *_: Any) -> None:
        """Before a layer runs: the other calls come as far as here, and its weights are there."""
        self._turns.next_turn()
        if self._held != name:
            self._drop()
            self._fill(name)

    def _fill(self, name: str) -> None:
        def only_the_layer(model: nn.Module, state: dict[str, Any], *_: Any) -> None:
            for key in [key for key in state if not key.startswith(f"{name}.")]:
                del state[key]

        hook = self.model.register_state_dict_post_hook(only_the_layer)
        try:
            self._check(self._read(self.model))
        finally:
            hook.remove()
        self._held = name
        for following in self._layers[self._layers.index(name) + 1 :][:1]:
            self._expecting.soon(self._stored[following])
        self.model.get_submodule(name).to(self._device).requires_grad_(False)

    def _drop(self) -> None:
        if self._held:
            self.model.get_submodule(self._held).to("meta")
            self._held = ""
            trim()

    def _check(self, info: Any) -> None:
        names = sorted(info.missing_and_mismatched())
        if names:
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise UserError(
                f'The weights in "{self._folder}" lack {names[0]}{others}, or hold it in another shape; '
                "fetch the model again."
            )
