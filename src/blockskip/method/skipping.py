"""Block skipping with residual features (Eq. 3), around the model's own ``forward``.

      embed | 0  1 .. n-1 | n  ...  L-m-1 | L-m .. L-1 | head
            |    front    |     middle    |    tail    |
            |  features   |  LoRA trains  | + residual |

The front has nothing trainable before it, so what leaves block n-1 is the same in every step: it is stored and given
back, exactly. The tail f'_{L} = f'_{L-m} + delta with delta = f_L - f_{L-m} of the base is the method's approximation.
A run [a, b) inside (HollowedNet, arXiv 2411.01179) is replaced in the same way, each stream: f'_b = f'_a + f_b - f_a.
A stub without parameters stands where each skipped block was: names, list lengths and ``forward`` stay as they are.
"""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from blockskip.method.layout import IMAGE, TEXT, BlockLayout, Returns, State, pack, unpack
from blockskip.method.split import Split

#: What is stored for a group: ``front.<stream>`` and ``tail.<name>``, or ``inner.<stream>.<name>``.
Features = dict[str, torch.Tensor]


class SkipRule(ABC):
    """What stands in for the skipped spans. A rule of one's own is one subclass in a file outside the package.

    ``uses_front``: the front is replaced by stored features; otherwise what enters block 0 goes straight to block n.
    ``uses_tail``: something is stored of the tail. A run inside is treated as a tail, each of its streams by itself:
    text (B, text tokens, D), image (B, image tokens, D), or the joint one.
    """

    uses_front: bool = True
    uses_tail: bool = True

    def stores(self, split: Split) -> bool:
        """Whether a split needs stored features under this rule."""
        return bool((split.front and self.uses_front) or ((split.tail or split.inner[1]) and self.uses_tail))

    @abstractmethod
    def tail_features(self, span_input: torch.Tensor, span_output: torch.Tensor) -> Features:
        """What to store of the tail, per group; on joint streams one entry must be (B, image tokens, ...).

        Args:
            span_input: (B, image tokens, D), the base's state that enters block L-m.
            span_output: (B, image tokens, D), the base's state that enters the head.
        """

    @abstractmethod
    def tail_output(self, span_input: torch.Tensor, features: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The state that enters the head, from the trained state (B, image tokens, D) and the stored features."""


class ConstantResidual(SkipRule):
    """Eq. 3: f' = f'_{L-m} + delta, subtracted and added in float32, stored in the block's dtype."""

    def tail_features(self, span_input: torch.Tensor, span_output: torch.Tensor) -> Features:
        """``{"residual": (B, image tokens, D)}``."""
        return {"residual": (span_output.float() - span_input.float()).to(span_output.dtype)}

    def tail_output(self, span_input: torch.Tensor, features: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The input plus the residual, in the input's dtype."""
        return (span_input.float() + features["residual"].float()).to(span_input.dtype)


class NoResidual(SkipRule):
    """The paper's ablation: skipped blocks are simply absent, f' = f'_{L-m}, at both ends."""

    uses_front = False
    uses_tail = False

    def tail_features(self, span_input: torch.Tensor, span_output: torch.Tensor) -> Features:
        """Nothing is stored."""
        return {}

    def tail_output(self, span_input: torch.Tensor, features: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The input."""
        return span_input


class Stub(nn.Module):
    """A parameter-free stand-in for a block: gives on what comes in, or what ``behave`` makes of it."""

    def __init__(self, block: nn.Module, returns: Returns) -> None:
        super().__init__()
        self._names: tuple[str, ...] = block._names if isinstance(block, Stub) else _argument_names(block)
        self._returns = returns
        self.behave: Callable[[State], Mapping[str, torch.Tensor | None]] | None = None

    def incoming(self, *args: Any, **kwargs: Any) -> State:
        """The streams in a call to the block; the first argument is always the image or joint stream."""
        given = dict(zip(self._names, args, strict=False)) | kwargs
        found = {IMAGE: given[self._names[0]], TEXT: given.get(TEXT)}
        return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}

    def forward(self, *args: Any, **kwargs: Any) -> object:
        """What the block would have returned, in its order."""
        state = self.incoming(*args, **kwargs)
        return unpack(self.behave(state) if self.behave else state, self._returns)


def _argument_names(block: nn.Module) -> tuple[str, ...]:
    """The names of a block's arguments, in order."""
    function = getattr(block.forward, "__func__", None)
    if function is None:
        return tuple(inspect.signature(block.forward).parameters)
    return _names_of(function)[1:]


@functools.cache
def _names_of(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def install_stubs(model: nn.Module, layout: BlockLayout, indices: Sequence[int]) -> dict[int, nn.Module]:
    """Put stubs in the place of blocks; returns the blocks that stood there (drop them to free their memory)."""
    names = layout.names(model)
    return {
        index: layout.replace(model, index, Stub(layout.blocks(model)[index], layout.returns_of(names[index])))
        for index in indices
        if not isinstance(layout.blocks(model)[index], Stub)
    }


class SkippedModel:
    """A transformer whose skipped blocks are stubs, together with the features that the stubs give back.

    Args:
        model: the transformer; stubs are installed where blocks still stand.
        layout, split: which blocks.
        rule: what stands in for the spans.

    The features must stay set until ``backward`` has ended: gradient checkpointing calls the stubs' neighbours again.
    """

    def __init__(self, model: nn.Module, layout: BlockLayout, split: Split, rule: SkipRule) -> None:
        self.model, self.layout, self.split, self.rule = model, layout, split, rule
        self.num_blocks = layout.count(model)
        install_stubs(model, layout, split.skipped(self.num_blocks))
        self.features: Features = {}
        blocks = layout.blocks(model)
        if split.front and rule.uses_front:
            cast(Stub, blocks[split.front - 1]).behave = self._front
        if split.tail:
            first = self.num_blocks - split.tail
            cast(Stub, blocks[first]).behave = self._tail
            self._tail_returns = layout.returns_of(layout.names(model)[first])
        if split.inner[1]:
            first = split.inner[0]
            cast(Stub, blocks[first]).behave = self._inner
            self._inner_returns = layout.returns_of(layout.names(model)[first])

    def _front(self, state: State) -> State:
        return {name[6:]: value for name, value in self.features.items() if name.startswith("front.")}

    def _tail(self, state: State) -> State:
        stored = {name[5:]: value for name, value in self.features.items() if name.startswith("tail.")}
        tokens = state[IMAGE]
        joint = self.layout.order is not None and TEXT not in self._tail_returns
        sizes = [value.shape[1] for value in stored.values() if value.ndim > 1]
        count = max(sizes) if joint and sizes else tokens.shape[1]
        image = self.rule.tail_output(self.layout.image_tokens(tokens, count), stored)
        if count != tokens.shape[1]:
            rest = tokens[:, :-count] if self.layout.order == "txt_img" else tokens[:, count:]
            image = torch.cat([rest, image] if self.layout.order == "txt_img" else [image, rest], dim=1)
        return state | {IMAGE: image}

    def _inner(self, state: State) -> State:
        replaced = {}
        for stream in set(self._inner_returns) & set(state):
            prefix = f"inner.{stream}."
            stored = {name.removeprefix(prefix): v for name, v in self.features.items() if name.startswith(prefix)}
            replaced[stream] = self.rule.tail_output(state[stream], stored)
        return state | replaced

    def __call__(self, features: Features, **inputs: Any) -> Any:
        """The model's own output with the spans replaced."""
        self.features = features
        return self.model(**inputs)


class _Stop(Exception):
    """Ends a forward pass as soon as what it was run for is known."""


@contextmanager
def _hooks(*handles: Any) -> Iterator[None]:
    try:
        yield
    except _Stop:
        pass
    finally:
        for handle in handles:
            handle.remove()


def run_block(
    model: nn.Module, layout: BlockLayout, index: int, state: State | None, inputs: Mapping[str, Any]
) -> tuple[State, torch.Tensor]:
    """Run block ``index`` alone through the model's own ``forward``: every other block must be a stub.

    Args:
        index: the block; 0 also runs the embedders and refiners.
        state: what left block ``index - 1``; None for block 0.
        inputs: keyword arguments of ``forward``.

    Returns:
        What leaves the block, and the image or joint stream (B, tokens, D) that entered it.
    """
    block, returns = layout.blocks(model)[index], layout.returns_of(layout.names(model)[index])
    reader = Stub(block, returns)
    entered: list[torch.Tensor] = []
    left: list[State] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entered.append(reader.incoming(*args, **kwargs)[IMAGE])

    def after(_: nn.Module, args: tuple[Any, ...], returned: object) -> None:
        left.append(pack(returned, returns))
        raise _Stop

    hooks = block.register_forward_pre_hook(before, with_kwargs=True), block.register_forward_hook(after)
    with _giving(model, layout, index, state), _hooks(*hooks):
        model(**inputs)
    return left[0], entered[0]


def run_head(
    model: nn.Module, layout: BlockLayout, state: State, inputs: Mapping[str, Any]
) -> tuple[Any, torch.Tensor]:
    """Run what follows the last block: every block must be a stub.

    Returns:
        The model's output, and the image tokens (B, tokens, D) that entered the head.
    """
    caught: list[torch.Tensor] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caught.append(args[0] if args else kwargs[IMAGE])

    hook = layout.head_of(model).register_forward_pre_hook(before, with_kwargs=True)
    with _giving(model, layout, layout.count(model), state), _hooks(hook):
        output = model(**inputs)
    return output, caught[0]


@contextmanager
def _giving(model: nn.Module, layout: BlockLayout, index: int, state: State | None) -> Iterator[None]:
    """Let the stub before block ``index`` return a stored state."""
    if index == 0 or state is None:
        yield
        return
    stub = cast(Stub, layout.blocks(model)[index - 1])
    stub.behave = lambda _: state
    try:
        yield
    finally:
        stub.behave = None


def inner_features(rule: SkipRule, before: State, after: State) -> Features:
    """What is stored for a group of a run inside: ``inner.<stream>.<name>``, as the rule makes it of every stream.

    Args:
        before, after: what leaves the block before the run, and its last block.
    """
    return {
        f"inner.{stream}.{name}": value
        for stream, left in after.items()
        for name, value in rule.tail_features(before[stream], left).items()
    }


def span_features(
    layout: BlockLayout,
    rule: SkipRule,
    front: State | None,
    tail_input: torch.Tensor | None,
    head_input: torch.Tensor | None,
) -> Features:
    """What is stored for a group: ``front.<stream>`` as block n-1 returned it, ``tail.<name>`` as the rule makes it."""
    features = {f"front.{name}": value for name, value in (front or {}).items()} if rule.uses_front else {}
    if tail_input is not None and head_input is not None:
        span_input = layout.image_tokens(tail_input, head_input.shape[1])
        features |= {f"tail.{name}": value for name, value in rule.tail_features(span_input, head_input).items()}
    return features
