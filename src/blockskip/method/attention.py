"""The attention between image and text in chosen blocks, reached from outside: no processor is replaced or copied.

    block(...)  ->  its attention processor  ->  scaled_dot_product_attention(query, key, value)
                                                   |  both kinds of tokens take part: ``attend`` answers
                                                   |  any other call: as it is

Hooks are all that a model gets, and they sit on whatever module stands in a block's place when the model is called:
the block, one that is streamed (method/streaming.py), or one that is put there for a single call.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from blockskip.method.layout import IMAGE, TEXT, BlockLayout
from blockskip.method.skipping import Stub
from blockskip.method.streaming import StreamedBlock

SDPA = F.scaled_dot_product_attention
EVERYTHING = slice(None)


class AttentionNotSeen(RuntimeError):
    """A chosen block ran without the attention that was to be changed or measured, or did not run at all.

    Args:
        blocks: full names of the blocks.
    """

    def __init__(self, blocks: Collection[str]) -> None:
        self.blocks = tuple(blocks)
        super().__init__(
            f"no attention between image and text was seen in {', '.join(self.blocks)}: it did not run, or not by "
            "torch's scaled_dot_product_attention (diffusers' attention backend must be the native one)."
        )


class TextsOfSeveralLengths(AttentionNotSeen):
    """Each sample's image tokens stand behind its own text in one stream, and the texts of a batch differ in length.

    Args:
        block: full name of the block in which this was seen.
    """

    def __init__(self, block: str) -> None:
        self.blocks = (block,)
        RuntimeError.__init__(
            self,
            f"the texts of a batch have different lengths, and in {block} each sample's image stands behind its own: "
            "call the model with texts of one length.",
        )


@dataclass(frozen=True)
class Attention:
    """A call of ``scaled_dot_product_attention`` in which image tokens meet the text.

    Args:
        query, key, value: (B, heads, tokens, D); in joint attention both kinds of tokens are queries and keys.
        mask: boolean (True: may be seen) or additive, broadcast to (B, heads, queries, keys); or None.
        text: places of the text among the keys.
        image: places of the image among the queries.
        options: ``dropout_p``, ``scale``, ``enable_gqa``.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    text: slice
    image: slice
    options: dict[str, Any] = field(default_factory=dict)

    def attend(
        self, queries: slice = EVERYTHING, keys: slice = EVERYTHING, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The output (rows, heads, queries, D) of some of the queries, which see some of the keys.

        Args:
            rows: int64 numbers of the samples in the batch; None takes all.
        """
        query, key, value = (tensor if rows is None else tensor[rows] for tensor in (self.query, self.key, self.value))
        mask = self.mask_of(queries, keys, rows)
        return SDPA(query[:, :, queries], key[:, :, keys], value[:, :, keys], attn_mask=mask, **self.options)

    def mask_of(
        self, queries: slice = EVERYTHING, keys: slice = EVERYTHING, rows: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """The part of the mask for ``attend``; dimensions that are broadcast stay so."""
        mask = self.mask
        if mask is None:
            return None
        if rows is not None and mask.ndim == 4 and mask.shape[0] != 1:
            mask = mask[rows]
        if mask.shape[-2] != 1:
            mask = mask[..., queries, :]
        return mask if mask.shape[-1] == 1 else mask[..., keys]


class BlockAttention(ABC):
    """Watches the attention of chosen blocks while ``watched`` is open.

    Args:
        model: the transformer.
        layout: where its blocks are and how they read the text.
        blocks: numbers of the chosen ones.

    Raises:
        ValueError: the model has no such block, or the layout does not say how blocks read the text.
    """

    def __init__(self, model: nn.Module, layout: BlockLayout, blocks: Collection[int]) -> None:
        self._model, self._layout, self._names = model, layout, layout.names(model)
        for index in blocks:
            if not 0 <= index < len(self._names):
                raise ValueError(f"there is no block {index}: the model's blocks are 0 to {len(self._names) - 1}.")
        if layout.cross is None and layout.order is None:
            raise ValueError("the layout does not say how blocks read the text: order and cross are both None.")
        self.runs = dict.fromkeys(sorted(blocks), 0)
        self._hooked: dict[int, tuple[weakref.ref[nn.Module], list[RemovableHandle]]] = {}
        self._open: list[_Run] = []
        self._text_tokens: int | None = None
        self._given_tokens: int | None = None
        self._joint = False
        self._calls = 0

    @abstractmethod
    def attend(self, index: int, attention: Attention) -> torch.Tensor:
        """The output (B, heads, queries, D) that block ``index`` gets in place of the call's."""

    def leave(self, index: int, output: torch.Tensor) -> torch.Tensor | None:
        """What leaves the cross-attention module of block ``index`` in place of ``output``; None leaves it."""
        return None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch inside; ``runs`` counts the runs of each block in which its attention was seen.

        Raises:
            AttentionNotSeen: a chosen block ran without it, or the model ran and the block did not.
        """

        def arrive(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._given_tokens = self._layout.joint_text(kwargs)
            self._calls += 1
            self._hook_blocks()

        self._hook_blocks()
        call = self._model.register_forward_pre_hook(arrive, with_kwargs=True)
        try:
            yield
        finally:
            call.remove()
            for _, handles in self._hooked.values():
                for handle in handles:
                    handle.remove()
            self._hooked.clear()
            while self._open:  # only after an interrupt, which skips the hooks
                self._open.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]
        missing = [self._names[index] for index, runs in self.runs.items() if not runs]
        if self._calls and missing:
            raise AttentionNotSeen(missing)

    def _hook_blocks(self) -> None:
        """Put hooks on the modules that stand in the blocks' places now, and remove those of modules that are gone."""
        blocks, cross = self._layout.blocks(self._model), self._layout.cross
        if cross is None:
            self._hook(-1, _inner(blocks[0]), self._hook_first)
        for index in self.runs:
            if not isinstance(blocks[index], Stub):
                inner = _inner(blocks[index])
                self._hook(index, getattr(inner, cross) if cross else inner, partial(self._hook_chosen, index))

    def _hook(self, place: int, module: nn.Module, make: Callable[[nn.Module], list[RemovableHandle]]) -> None:
        known = self._hooked.get(place)
        if known is not None:
            if known[0]() is module:
                return
            for handle in known[1]:
                handle.remove()
        self._hooked[place] = weakref.ref(module), make(module)

    def _hook_first(self, module: nn.Module) -> list[RemovableHandle]:
        """Count the text tokens of the first block: later ones may get them in one joint stream.

        Where the first one does, they are those that the model was called with.
        """
        reader = module if isinstance(module, Stub) else Stub(module, ())

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            text = reader.incoming(*args, **kwargs).get(TEXT)
            self._joint = text is None
            self._text_tokens = self._given_tokens if text is None else text.shape[1]

        return [module.register_forward_pre_hook(before, with_kwargs=True)]

    def _hook_chosen(self, index: int, module: nn.Module) -> list[RemovableHandle]:
        """Watch every run of a block, or of its cross-attention."""
        reader = Stub(module, ())

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            streams = reader.incoming(*args, **kwargs)
            run = _Run(self, index, module, self._places(streams[IMAGE], streams.get(TEXT)))
            run.__enter__()  # type: ignore[no-untyped-call]
            self._open.append(run)

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            if not self._open or self._open[-1].module is not module:  # another hook failed ahead of ``before``
                return None
            run = self._open.pop()
            run.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            if output is None:  # the run failed, or was stopped where gradient checkpointing has what it needs
                return None
            changed = self.leave(index, output) if self._layout.cross else None
            if changed is None and not run.seen:
                raise AttentionNotSeen([self._names[index]])
            self.runs[index] += 1
            return changed

        return [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, prepend=True, always_call=True),
        ]

    def _places(self, image: torch.Tensor, text: torch.Tensor | None) -> _Places | None:
        """Where the tokens are in attention between a block's streams; None: their numbers are not known."""
        if text is not None:
            text_tokens, image_tokens = text.shape[1], image.shape[1]
        elif self._text_tokens is not None:  # one joint stream
            text_tokens, image_tokens = self._text_tokens, image.shape[1] - self._text_tokens
        else:
            return None
        if self._layout.cross is not None:
            return _Places(slice(0, text_tokens), slice(0, image_tokens), image_tokens, text_tokens)
        both = text_tokens + image_tokens
        if self._layout.order == "txt_img":
            return _Places(slice(0, text_tokens), slice(text_tokens, both), both, both)
        return _Places(slice(image_tokens, both), slice(0, image_tokens), both, both)


def _inner(block: nn.Module) -> nn.Module:
    """The block itself. In the backward pass a streamed one calls it again, but not its own hooks."""
    return cast(nn.Module, block._block) if isinstance(block, StreamedBlock) else block


@dataclass(frozen=True)
class _Places:
    """Text among the keys and image among the queries, and how many queries and keys there are in all."""

    text: slice
    image: slice
    queries: int
    keys: int


class _Run(TorchFunctionMode):
    """Sees every torch function while one block runs, and hands on those that are attention to the text."""

    def __init__(self, owner: BlockAttention, index: int, module: nn.Module, places: _Places | None) -> None:
        super().__init__()
        self.module, self.seen = module, False
        self._owner, self._index, self._places = owner, index, places

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        attention = self._read(*args, **(kwargs or {})) if func is SDPA else None
        if attention is None:
            return func(*args, **(kwargs or {}))
        self.seen = True
        return self._owner.attend(self._index, attention)

    def _read(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Attention | None:
        """The call, if its tokens are those of text and image (an attention among image tokens alone is not)."""
        places = self._places
        if places is None or is_causal or (query.shape[-2], key.shape[-2]) != (places.queries, places.keys):
            return None
        if self._owner._joint and attn_mask is not None:
            raise TextsOfSeveralLengths(self._owner._names[self._index])
        options["dropout_p"] = dropout_p
        return Attention(query, key, value, attn_mask, places.text, places.image, options)
