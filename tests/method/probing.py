"""What tests of hidden text need of any model: one block's call with another text, and what the call gave."""

import inspect
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from blockskip.method.layout import IMAGE, TEXT, pack
from blockskip.method.masking import hidden_text
from blockskip.method.skipping import Stub
from tests.method.bases import Base


def distance(value: torch.Tensor, reference: torch.Tensor) -> float:
    """|value - reference| / |reference|."""
    return float((value.float() - reference.float()).norm() / reference.float().norm())


def text_tokens(base: Base) -> int:
    """How many text tokens enter the first block: as many as the model is given where they enter in a joint stream."""
    found: list[int] = []

    def look(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        text = Stub(block, ()).incoming(*args, **kwargs).get(TEXT)
        count = base.layout.joint_text(base.inputs) if text is None else text.shape[1]
        assert count is not None
        found.append(count)

    handle = base.layout.blocks(base.model)[0].register_forward_pre_hook(look, with_kwargs=True)
    with torch.no_grad():
        base.output()
    handle.remove()
    return found[0]


def block_output(
    base: Base, index: int, *, other_text: bool, hidden: Collection[int] | None = None
) -> dict[str, torch.Tensor]:
    """Image and text tokens (B, tokens, D) that leave block `index`, by name; whole text streams may be absent.

    Args:
        other_text: add noise to the text that enters the block.
        hidden: blocks whose text is hidden; None does not even open the context.
    """
    block, layout, count = base.layout.blocks(base.model)[index], base.layout, text_tokens(base)
    found: dict[str, torch.Tensor] = {}

    def change(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        call = inspect.signature(block.forward).bind(*args, **kwargs)
        name = TEXT if call.arguments.get(TEXT) is not None else next(iter(call.arguments))
        stream = call.arguments[name].clone()
        text = stream if name == TEXT else _parts(base, stream, count)[TEXT]
        text += torch.randn(text.shape, generator=torch.Generator().manual_seed(8)).to(text.dtype)
        call.arguments[name] = stream
        return call.args, call.kwargs

    def keep(_: nn.Module, args: tuple[Any, ...], returned: object) -> None:
        state = pack(returned, layout.returns_of(layout.names(base.model)[index]))
        joint = layout.order is not None and TEXT not in layout.returns_of(layout.names(base.model)[index])
        found.update(_parts(base, state[IMAGE], count) if joint else state)

    handles = [block.register_forward_hook(keep)]
    if other_text:
        handles.append(block.register_forward_pre_hook(change, with_kwargs=True))
    with torch.no_grad(), hidden_text(base.model, layout, hidden) if hidden is not None else nullcontext():
        base.output()
    for handle in handles:
        handle.remove()
    return found


def _parts(base: Base, joint: torch.Tensor, text: int) -> Mapping[str, torch.Tensor]:
    """Views of a joint stream."""
    if base.layout.order == "txt_img":
        return {TEXT: joint[:, :text], IMAGE: joint[:, text:]}
    return {IMAGE: joint[:, :-text], TEXT: joint[:, -text:]}


def assert_text_is_hidden(base: Base, index: int) -> None:
    """The image that leaves a masked block does not depend on its text at all; the text that leaves stays as it was.

    To rounding, since text queries have a call of their own. Without the mask the image depends on the text.
    """
    plain = block_output(base, index, other_text=False)
    control = block_output(base, index, other_text=True)
    masked = block_output(base, index, other_text=False, hidden=[index])
    found = block_output(base, index, other_text=True, hidden=[index])
    assert torch.equal(found[IMAGE], masked[IMAGE])
    assert distance(control[IMAGE], plain[IMAGE]) > 1e-3
    assert distance(masked[IMAGE], plain[IMAGE]) > 1e-3
    if TEXT in plain:
        assert distance(masked[TEXT], plain[TEXT]) <= 1e-6
        assert distance(control[TEXT], plain[TEXT]) > 1e-2


def traces(model: nn.Module) -> dict[str, Any]:
    """Everything in a model's modules that a probe could leave behind: attributes, hooks, and the tensors' values."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            found[f"{name}:{key}"] = dict(value) if "hooks" in key and isinstance(value, Mapping) else id(value)
    for name, value in model.state_dict().items():
        found[name] = (value.data_ptr(), value._version, value.double().sum().item())
    return found
