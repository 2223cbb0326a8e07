"""What ``forward`` computes ahead of its blocks, kept from one pass to the next when blocks run one at a time.

    pass 1     embed time, text, positions | stub | block 1           every output is kept
    pass i     (given back)                | stub | ...  | block i    the same values, not computed again

The calls ahead of the first block depend on the inputs alone, so in the same group they give the same in every pass,
in the same order. The embedder of the image stream is left out: it is cheap, and its output as large as a state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from blockskip.method.layout import IMAGE, BlockLayout
from blockskip.method.skipping import Stub

#: Modules and what they returned, in the order in which they were called.
Outputs = list[tuple[nn.Module, Any]]
#: Different outputs of one module that are kept to be shared with later groups.
SHARED = 4


class AheadOfBlocks:
    """Keeps and gives back what a model's own modules return ahead of its first block; without gradients only.

    Args:
        model: a transformer whose blocks run one at a time.
        layout: where its blocks are.
        keep: where outputs wait; default: where they are.
        share: keep equal outputs of several groups (positions, one caption) once.
    """

    def __init__(
        self, model: nn.Module, layout: BlockLayout, keep: torch.device | None = None, share: bool = True
    ) -> None:
        self._model, self._layout, self._keep, self._most = model, layout, keep, SHARED if share else 0
        lists = {id(getattr(model, name)) for name in layout.lists}
        self._modules: list[nn.Module] = []
        for child in model.children():
            if id(child) not in lists:
                parts = isinstance(child, (nn.ModuleList, nn.ModuleDict))
                self._modules += child.children() if parts else [child]
        self._distinct: dict[int, list[torch.Tensor]] = {}

    @contextmanager
    def kept(self) -> Iterator[Outputs]:
        """Keep what is returned in a pass inside; the list is filled when the pass is over."""
        calls: list[tuple[nn.Module, Any, list[tuple[torch.Tensor, int]]]] = []
        image: list[torch.Tensor] = []
        outputs: Outputs = []

        def keep(module: nn.Module, returned: Any) -> Any:
            if not image:
                tensors = [value for value in pytree.tree_leaves(returned) if isinstance(value, torch.Tensor)]
                calls.append((module, returned, [(value, value._version) for value in tensors]))
            return returned

        def arrive(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            stub = block if isinstance(block, Stub) else Stub(block, ())
            image.append(stub.incoming(*args, **kwargs)[IMAGE])

        handle = self._layout.blocks(self._model)[0].register_forward_pre_hook(arrive, with_kwargs=True)
        try:
            with self._forwards(lambda module, own: lambda *args, **kwargs: keep(module, own(*args, **kwargs))):
                yield outputs
        finally:
            handle.remove()
        changed = any(value._version != version for _, _, values in calls for value, version in values)
        if not changed:  # else ``forward`` goes on to write into what a module returned: nothing can be given back
            for place, (module, returned, values) in enumerate(calls):
                own_image = any(value is entered for entered in image for value, _ in values)
                outputs.append((module, None if own_image else self._stored(place, returned)))

    @contextmanager
    def given(self, outputs: Outputs, device: torch.device) -> Iterator[None]:
        """Give back what was kept in place of computing it; what was not kept is computed."""
        place = 0

        def forward(module: nn.Module, own: Callable[..., Any]) -> Callable[..., Any]:
            def give(*args: Any, **kwargs: Any) -> Any:
                nonlocal place
                if place >= len(outputs) or outputs[place][0] is not module:
                    place = len(outputs)  # behind the first block, or another order: nothing here is known any more
                    return own(*args, **kwargs)
                returned = outputs[place][1]
                place += 1
                if returned is None:
                    return own(*args, **kwargs)
                if self._keep in (None, device):
                    return returned
                return pytree.tree_map_only(torch.Tensor, lambda value: value.to(device), returned)

            return give

        with self._forwards(forward):
            yield

    @contextmanager
    def _forwards(self, made: Callable[[nn.Module, Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
        """Let ``forward`` of every module be what is made of it."""
        before = [module.__dict__.get("forward") for module in self._modules]
        for module in self._modules:
            module.__dict__["forward"] = made(module, module.forward)
        try:
            yield
        finally:
            for module, own in zip(self._modules, before, strict=True):
                if own is None:
                    del module.__dict__["forward"]
                else:
                    module.__dict__["forward"] = own

    def _stored(self, place: int, returned: Any) -> Any:
        """What was returned, where it waits; an equal tensor of another group in its place where there is one."""
        known = self._distinct.setdefault(place, [])

        def stored(value: torch.Tensor) -> torch.Tensor:
            value = value if self._keep is None else value.to(self._keep)
            for other in known:
                if other.shape == value.shape and other.dtype == value.dtype and torch.equal(other, value):
                    return other
            if len(known) < self._most:
                known.append(value)
            return value

        return pytree.tree_map_only(torch.Tensor, stored, returned)


def outputs_bytes(outputs: Outputs) -> int:
    """Bytes of what is kept for a group, as if nothing were shared with others."""
    tensors = [value for _, kept in outputs for value in pytree.tree_leaves(kept) if isinstance(value, torch.Tensor)]
    return sum(value.numel() * value.element_size() for value in tensors)
