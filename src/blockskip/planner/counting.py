"""Live bytes and work, counted while kernels run: every new storage is added, and subtracted when it dies.

    with fake_tensors(), LiveBytes() as live, live.role("activations"):
        kernel(...)
    live.device_peak, live.device_split, live.flops

The same counter works on real tensors, which is how the planner is held to what a real run takes.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

#: What device memory is held by.
DEVICE_ROLES = ("weights", "adapters", "gradients", "optimizer", "activations", "other")
#: The role of what lies in host memory.
HOST = "host"


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that are alive, by role, their peaks, and floating-point operations.

    A storage counts from the operation that made it until nothing refers to it, the autograd graph included. Device and
    host are told apart by role, not by ``tensor.device``: a plan runs on fake tensors of the CPU. Tensor subclasses are
    counted by the storages inside them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, tuple[int, str]] = {}
        self._role = "activations"
        self.now: Counter[str] = Counter()
        self.flops = 0
        self.reset_peaks()

    def reset_peaks(self) -> None:
        """Begin anew: the peaks are what is alive now."""
        self.device_peak, self.host_peak, self.pool_peak = self._device(), self.now[HOST], sum(self.now.values())
        self.device_split = {role: self.now[role] for role in DEVICE_ROLES}

    @contextmanager
    def role(self, name: str) -> Iterator[None]:
        """What is made inside belongs to a role: one of ``DEVICE_ROLES``, or ``HOST``."""
        before, self._role = self._role, name
        try:
            yield
        finally:
            self._role = before

    def tag(self, tensors: Iterable[torch.Tensor | None], role: str) -> None:
        """Give tensors that exist a role; those that were not seen yet are counted from now on."""
        for storage in _storages(tensors):
            self._add(storage, role, again=True)

    def tag_module(self, module: nn.Module, role: str = "weights") -> None:
        """Give a module's parameters and buffers a role, and the tensors that it holds as plain attributes."""
        self.tag([*module.parameters(), *module.buffers(), *tables(module)], role)

    def watch_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Count the gradients of parameters as such from the moment in which they are accumulated."""
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(lambda value: self.tag([value.grad], "gradients"))

    def add_to_peaks(self, size: int, role: str = "activations") -> None:
        """Raise the peaks by what is there all the time and was not counted; lower them by what was and is not.

        By default the size is of calls like the one that was run.
        """
        self.device_peak += size
        self.pool_peak += size
        self.device_split[role] += size

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation and look at what it made."""
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # autograd asks for it at every step, and nothing is made
        output = func(*args, **(kwargs or {}))
        for storage in _storages(tree_leaves(output)):
            self._add(storage, self._role)
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=output)
        return output

    def _device(self) -> int:
        return sum(self.now[role] for role in DEVICE_ROLES)

    def _add(self, storage: torch.UntypedStorage, role: str, again: bool = False) -> None:
        place = storage._cdata
        known = self._sizes.get(place)
        if known is not None:
            if again and known[1] != role:
                self.now[known[1]] -= known[0]
                self.now[role] += known[0]
                self._sizes[place] = (known[0], role)
            return
        size = storage.nbytes()
        self._sizes[place] = (size, role)
        self.now[role] += size
        weakref.finalize(storage, self._remove, place).atexit = False
        device = self._device()
        if device > self.device_peak:
            self.device_peak, self.device_split = device, {name: self.now[name] for name in DEVICE_ROLES}
        self.host_peak = max(self.host_peak, self.now[HOST])
        self.pool_peak = max(self.pool_peak, device + self.now[HOST])

    def _remove(self, place: int) -> None:
        size, role = self._sizes.pop(place)
        self.now[role] -= size


def tables(module: nn.Module) -> list[torch.Tensor]:
    """Tensors that a module's parts hold beside parameters and buffers (positions of Qwen-Image, of Lumina-Image 2)."""
    held = (value for part in module.modules() for value in vars(part).values())
    each = (one for value in held for one in (value if isinstance(value, list) else [value]))
    return [one for one in each if isinstance(one, torch.Tensor)]


def _storages(values: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    for value in values:
        if not isinstance(value, torch.Tensor) or value.device.type == "meta":
            continue  # nothing is held without memory; fake tensors are of the device that they stand for
        if is_traceable_wrapper_subclass(value):
            names, _ = value.__tensor_flatten__()
            yield from _storages(getattr(value, name) for name in names)
        else:
            yield value.untyped_storage()
