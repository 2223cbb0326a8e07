"""What CUDA's autocast does and the CPU's does not, for plans of a CUDA device made on a CPU."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

#: Functions of transformers and autoencoders that CUDA's autocast runs in float32 (torch's table "CUDA ops that
#: autocast to float32"); the CPU's leaves them in the dtype of their inputs.
FLOAT32: frozenset[Callable[..., Any]] = frozenset({
    F.layer_norm, torch.layer_norm, F.group_norm, torch.group_norm, F.softmax, torch.softmax, torch.Tensor.softmax,
    torch.pow, torch.Tensor.pow, torch.Tensor.__pow__, torch.exp, torch.Tensor.exp, torch.log, torch.Tensor.log,
    torch.rsqrt, torch.Tensor.rsqrt, torch.cumsum, torch.Tensor.cumsum, F.mse_loss,
})  # fmt: skip


class CudaAutocast(TorchFunctionMode):
    """Inside autocast, casts 16-bit inputs of the functions in ``FLOAT32`` to float32, so that their outputs, and what
    autograd keeps of them, have the size they would have on CUDA.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function, its inputs cast where CUDA would."""
        if func in FLOAT32 and torch.is_autocast_enabled("cpu"):
            args = tuple(_wide(value) for value in args)
            kwargs = {name: _wide(value) for name, value in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))


def _wide(value: Any) -> Any:
    narrow = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if narrow else value


def like_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """What a device does otherwise than the CPU, for what runs inside."""
    return CudaAutocast() if device.type == "cuda" else contextlib.nullcontext()


def run_like(module: nn.Module, device: torch.device) -> None:
    """Let a module always run as on a device: a backward pass that computes it anew leaves every mode behind."""
    forward = module.forward

    @functools.wraps(forward)
    def within(*args: Any, **kwargs: Any) -> Any:
        with like_device(device):
            return forward(*args, **kwargs)

    module.forward = within  # type: ignore[method-assign]
