"""LoRA files that act beside frozen layers, and changed weights: what belongs to the base, or what to draw with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from blockskip.adapters.difference import read_difference
from blockskip.adapters.files import find_lora, read_lora
from blockskip.errors import UserError
from blockskip.keys import file_sha256

#: The setting by which adapters belong to the base of a run.
BASE = "model.base_adapters"


class FrozenAdapters:
    """LoRA files whose products are added to the outputs of the layers as they are loaded.

    The weights are not touched: in 16 bits a merge would round small differences away. A file of changed weights
    (``adapters.difference``) is added to the weights, in float32, and rounded as its own training rounded it.

    Args:
        paths: files or folders of adapters.
        scale: strength of all of them.
        key: the setting to name in errors.

    Raises:
        UserError: a file is missing or is no LoRA.
    """

    def __init__(self, paths: Sequence[str], scale: float = 1.0, key: str = BASE) -> None:
        self.files = [find_lora(Path(path).expanduser(), key) for path in paths]
        self.scale = scale
        self._pairs: dict[str, list[tuple[torch.Tensor, torch.Tensor, float]]] = {}
        self._differences: dict[str, list[torch.Tensor]] = {}
        for file in self.files:
            difference = read_difference(file, key)
            if difference is not None:
                for name, value in difference.items():
                    self._differences.setdefault(name, []).append(value)
                continue
            lora = read_lora(file, key)
            for name, factor in lora.scales.items():
                a, b = lora.tensors[f"{name}.lora_A.weight"], lora.tensors[f"{name}.lora_B.weight"]
                self._pairs.setdefault(name, []).append((a, b, factor))

    @classmethod
    def of_pairs(cls, pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor, float]]) -> FrozenAdapters:
        """Adapters that are in memory: A (rank, in), B (out, rank) and alpha / rank by the layer's full name."""
        made = cls([])
        made._pairs = {name: [pair] for name, pair in pairs.items()}
        return made

    def identity(self) -> tuple[str, ...]:
        """The files' hashes, and the strength, for the keys of stores."""
        return (*(file_sha256(file) for file in self.files), self.scale.hex()) if self.files else ()

    def check(self, model: nn.Module, key: str = BASE) -> None:
        """Hold the files against a transformer (an empty one will do).

        Raises:
            UserError: a layer does not exist in the model or has another shape, or changed weights would belong to the
                base of a training.
        """
        if self._differences and key == BASE:
            raise UserError(f"{key}: a file holds changed weights; only LoRA files can belong to the base of a run.")
        shapes = {name: value.shape for name, value in model.named_parameters()}
        for name, changes in self._differences.items():
            if name not in shapes:
                raise UserError(f'{key}: there are weights for "{name}", which this model does not have.')
            if any(change.shape != shapes[name] for change in changes):
                raise UserError(f'{key}: the weights are of another model: "{name}" has another shape there.')
        layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        for name, pairs in self._pairs.items():
            if name not in layers:
                raise UserError(f'{key}: the LoRA has weights for "{name}", which is no layer of this model.')
            weight = layers[name].weight
            for a, b, _ in pairs:
                if (b.shape[0], a.shape[1]) != tuple(weight.shape):
                    raise UserError(f'{key}: the LoRA was made for another model: "{name}" has another shape there.')

    def attach(self, module: nn.Module, prefix: str = "", device: torch.device | None = None) -> None:
        """y += scale * alpha / rank * B A x from now on, for every linear layer below ``module``; W += scale * dW.

        Args:
            module: a transformer, or a block of it.
            prefix: the block's full name.
            device: where the layers compute; default: where their weights are.
        """
        if self._differences:
            self._change(module, prefix)
        if not self._pairs:
            return
        for name, layer in module.named_modules():
            full = ".".join(part for part in (prefix, name) if part)
            for a, b, factor in self._pairs.get(full, ()):
                place = device or layer.weight.device
                layer.register_forward_hook(_product(a.to(place).float(), b.to(place).float(), factor * self.scale))

    def _change(self, module: nn.Module, prefix: str) -> None:
        for name, parameter in module.named_parameters():
            full = ".".join(part for part in (prefix, name) if part)
            for change in self._differences.get(full, ()):
                changed = parameter.detach().float() + self.scale * change.to(parameter.device)
                parameter.data = changed.to(parameter.dtype)  # not in place: it may be the model's file


def _product(a: torch.Tensor, b: torch.Tensor, factor: float) -> Callable[..., torch.Tensor]:
    def hook(_: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        return output + F.linear(F.linear(args[0], a), b) * factor

    return hook
