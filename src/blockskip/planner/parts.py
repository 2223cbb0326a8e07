"""A pipeline's parts at their true size without weights: fake tensors stand where parameters would."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig

from blockskip.errors import UserError
from blockskip.loading.autoencoder import Half, keep_half
from blockskip.loading.source import ModelSource
from blockskip.loading.weights import Weights

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


def fake_tensors() -> FakeTensorMode:
    """The mode in which tensors have a shape and a dtype and no memory; a model's few real ones may mix in."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def empty_part(source: ModelSource, part: str, dtype: torch.dtype) -> Any:
    """A part of the pipeline in eval mode, frozen, its parameters on the meta device in the dtype they would have."""
    library = json.loads((source.folder / "model_index.json").read_text(encoding="utf-8"))[part][0]
    if part == "transformer":  # older checkpoints have the name of a class that was renamed
        cls = getattr(importlib.import_module(library), source.family.transformer_class)
    else:
        cls = source.part_class(part)
    with init_empty_weights(include_buffers=False):
        if library == "transformers":
            model = cls(AutoConfig.from_pretrained(source.folder / part))
        else:
            model = cls.from_config(source.config(part))
    if part == "transformer":
        source.family.prepare(model)
    if library == "transformers":
        model.tie_weights()  # what was tied came apart on its way to the meta device
    cast(model, dtype)
    return model.requires_grad_(False).eval()


def empty_autoencoder(source: ModelSource, half: Half, dtype: torch.dtype) -> Any:
    """The autoencoder as ``load_autoencoder`` gives it, its parameters on the meta device."""
    vae = empty_part(source, "vae", dtype)
    keep_half(vae, half)
    return vae


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Give the parameters the dtype that ``from_pretrained`` would: some models keep a few of theirs in float32."""
    strict = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    kept = strict | (
        set(getattr(model, "_keep_in_fp32_modules", None) or ()) if hasattr(model, "config_name") else set()
    )
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name, module in model.named_modules():
        for leaf, value in module._parameters.items():
            if value is None or not value.is_floating_point():
                continue
            if value not in made:  # what is tied stays tied
                wanted = torch.float32 if kept & {*name.split("."), leaf} else dtype
                made[value] = nn.Parameter(value.detach().to(wanted), requires_grad=value.requires_grad)
            module._parameters[leaf] = made[value]
        for leaf, buffer in module._buffers.items():
            if isinstance(buffer, torch.Tensor) and buffer.is_floating_point() and leaf in _persistent(module):
                module._buffers[leaf] = buffer.to(dtype)


def _persistent(module: nn.Module) -> set[str]:
    return set(module._buffers) - module._non_persistent_buffers_set


def fake(model: nn.Module, leave: Collection[int] = ()) -> None:
    """Put fake tensors of the CPU in the place of parameters and buffers; called inside ``fake_tensors``.

    Tied parameters stay tied; requires_grad stays as it is.

    Args:
        leave: ids of parameters that stay as they are.
    """
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None and id(value) not in leave:
                if id(value) not in made:
                    empty = torch.empty(value.shape, dtype=value.dtype)
                    made[id(value)] = nn.Parameter(empty, requires_grad=value.requires_grad)
                module._parameters[name] = made[id(value)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
        for name, table in list(vars(module).items()):
            if isinstance(table, torch.Tensor):  # some models keep tables of positions outside their buffers
                vars(module)[name] = torch.empty(table.shape, dtype=table.dtype)
            elif isinstance(table, list) and table and all(isinstance(part, torch.Tensor) for part in table):
                vars(module)[name] = [torch.empty(part.shape, dtype=part.dtype) for part in table]


def module_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers."""
    return sum(value.numel() * value.element_size() for value in [*model.parameters(), *model.buffers()])


def stored_dtype(source: ModelSource, part: str) -> torch.dtype:
    """In which dtype the part's weights lie on disk, told by one floating tensor; bfloat16 where no file is at hand."""
    if part == "transformer" and source.single is not None:
        return source.single.dtype
    with contextlib.suppress(UserError, SafetensorError, OSError):
        if source.hub is None:
            for name, file in Weights(source.folder / part).files.items():
                with safe_open(file, framework="pt") as tensors:
                    dtype = _DTYPES.get(tensors.get_slice(name).get_dtype())
                if dtype is not None:  # FLUX.2's autoencoder begins with a count of batches
                    return dtype
    return torch.bfloat16


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the libraries' remarks on how models should be loaded."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def configs_of(folder: Path) -> list[Path]:
    """The files that a plan of the pipeline depends on."""
    return sorted([*folder.glob("*/config.json"), *folder.glob("*.json")])
