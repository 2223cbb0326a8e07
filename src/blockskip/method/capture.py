"""Features of skipped blocks from one full forward pass: the plain reference for the block-by-block pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from blockskip.method.layout import IMAGE, BlockLayout, State, pack
from blockskip.method.skipping import Features, SkipRule, Stub, inner_features, span_features
from blockskip.method.split import Split


def capture(
    model: nn.Module, layout: BlockLayout, split: Split, rule: SkipRule, inputs: Mapping[str, Any]
) -> tuple[Any, Features]:
    """The full model's output, and the features that stand in for its skipped spans; the model must be whole.

    Args:
        inputs: keyword arguments of ``forward``.
    """
    names, blocks = layout.names(model), layout.blocks(model)
    caught: dict[str, Any] = {"front": None, "tail": None, "head": None}
    handles = []

    def keep_left(name: str, index: int) -> None:
        def keep(_: nn.Module, args: tuple[Any, ...], returned: object) -> None:
            caught[name] = pack(returned, layout.returns_of(names[index]))

        handles.append(blocks[index].register_forward_hook(keep))

    def keep_tail(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caught["tail"] = Stub(block, ()).incoming(*args, **kwargs)[IMAGE]

    def keep_head(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caught["head"] = args[0] if args else kwargs[IMAGE]

    if split.front:
        keep_left("front", split.front - 1)
    start, stop = split.inner
    if stop:
        keep_left("before", start - 1)
        keep_left("after", stop - 1)
    if split.tail:
        handles.append(blocks[len(blocks) - split.tail].register_forward_pre_hook(keep_tail, with_kwargs=True))
        handles.append(layout.head_of(model).register_forward_pre_hook(keep_head, with_kwargs=True))
    try:
        output = model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    front = cast(State | None, caught["front"])
    features = span_features(layout, rule, front, cast(torch.Tensor | None, caught["tail"]), caught["head"])
    if stop and rule.uses_tail:
        features |= inner_features(rule, caught["before"], caught["after"])
    return output, {name: value.detach() for name, value in features.items()}
