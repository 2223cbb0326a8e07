"""The adapter's file: ``pytorch_lora_weights.safetensors`` as diffusers reads it, alpha and origin in its header."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from blockskip.errors import UserError
from blockskip.progress import say

FILE_NAME = "pytorch_lora_weights.safetensors"
#: Of the file that holds changed weights instead (``adapters.difference``).
DIFFERENCE_NAME = "weights_difference.safetensors"
PREFIX = "transformer."
#: The key under which diffusers keeps LoraConfig values in the header.
DIFFUSERS_KEY = "lora_adapter_metadata"


@dataclass(frozen=True)
class LoraFile:
    """A LoRA file's content.

    Args:
        tensors: by PEFT name without the ``transformer.`` prefix.
        scales: by the full names of the layers, what B A is multiplied by: alpha / rank.
        header: every other entry of the header.
    """

    tensors: dict[str, torch.Tensor]
    scales: dict[str, float]
    header: dict[str, str]


def lora_header(targets: list[str], rank: int, lora_alpha: float) -> str:
    """LoraConfig values as JSON, by which diffusers rebuilds exactly these layers; the targets are full names.

    The dropout of training is not among them: a pipeline that has loaded the file would draw with it.
    """
    values = {
        "r": rank, "lora_alpha": lora_alpha, "lora_dropout": 0.0, "target_modules": sorted(targets), "bias": "none",
        "use_rslora": False, "use_dora": False, "lora_bias": False, "rank_pattern": {}, "alpha_pattern": {},
    }  # fmt: skip
    return json.dumps({PREFIX + name: value for name, value in values.items()}, sort_keys=True)


def save_lora(
    folder: Path,
    state: Mapping[str, torch.Tensor],
    header: Mapping[str, str],
    write: Callable[[Path, Callable[[Path], None]], None],
) -> Path:
    """Write the adapter, read it back, and return its path.

    Args:
        state: by PEFT names, without prefix.
        header: texts for the file's header, ``lora_header`` under ``DIFFUSERS_KEY`` among them.
        write: how a file is written atomically (``store.files.write_atomically``).

    Raises:
        ValueError: a tensor is not finite; no file is written.
    """
    tensors = {PREFIX + name: value.detach().to("cpu").contiguous().clone() for name, value in state.items()}
    broken = [name for name, value in tensors.items() if not bool(torch.isfinite(value).all())]
    if broken:
        raise ValueError(f"the adapter has values that are not finite in {broken[0]}")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE_NAME
    write(path, lambda temporary: save_sorted(temporary, tensors, {"format": "pt", **header}))
    with safe_open(path, framework="pt") as saved:
        whole = set(saved.keys()) == set(tensors)
        if not whole or not all(torch.equal(saved.get_tensor(name), value) for name, value in tensors.items()):
            raise ValueError(f'"{path}" does not hold the adapter that was written')
    return path


def save_sorted(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """``save_file`` with the metadata in order: the library shuffles it, and equal adapters would be other bytes."""
    try:
        save_file(dict(tensors), path, metadata=dict(metadata))
    except SafetensorError as error:
        raise OSError(str(error)) from error
    with path.open("rb+") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        stream.seek(8)
        stream.write(text.ljust(length))


def find_lora(path: Path, key: str = "--lora") -> Path:
    """The LoRA file of a run's folder, of its ``adapter`` folder, or the file itself; or that of changed weights.

    Raises:
        UserError: there is none.
    """
    named = (folder / name for folder in (path, path / "adapter") for name in (FILE_NAME, DIFFERENCE_NAME))
    for candidate in (path, *named):
        if candidate.is_file():
            return candidate
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    if len(files) == 1:
        return files[0]
    raise UserError(f'{key}: "{path}" holds no LoRA; give a run\'s output folder or a .safetensors file.')


def read_lora(path: Path, key: str = "--lora") -> LoraFile:
    """A LoRA file in diffusers' (PEFT) format.

    Raises:
        UserError: the file cannot be read or has no LoRA pairs of a transformer.
    """
    try:
        with safe_open(path, framework="pt") as stored:
            header = dict(stored.metadata() or {})
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f'{key}: "{path}" cannot be read as safetensors ({error}).') from None
    others = sum(not name.startswith(PREFIX) for name in tensors)
    if others and others < len(tensors):
        say(f"{path.name}: {others} tensors that are not of the transformer are left aside.")
    state = {name.removeprefix(PREFIX): value for name, value in tensors.items() if name.startswith(PREFIX)}
    pairs = sorted(name.removesuffix(".lora_A.weight") for name in state if name.endswith(".lora_A.weight"))
    if not pairs or len(state) != 2 * len(pairs) or any(f"{name}.lora_B.weight" not in state for name in pairs):
        raise UserError(
            f'{key}: "{path}" is not a LoRA in diffusers\' format (transformer.<layer>.lora_A.weight pairs).'
        )
    try:
        values = json.loads(header.pop(DIFFUSERS_KEY, "{}"))
        scales = {name: _scale(name, state[f"{name}.lora_A.weight"].shape[0], values) for name in pairs}
    except (ValueError, TypeError, AttributeError):
        raise UserError(f'{key}: "{path}" has a damaged "{DIFFUSERS_KEY}" in its header.') from None
    return LoraFile(state, scales, header)


def _scale(name: str, rank: int, values: Mapping[str, Any]) -> float:
    """alpha / rank of a layer, as diffusers and PEFT read the header; without one alpha is the layer's rank."""
    alphas = values.get(f"{PREFIX}alpha_pattern") or {}
    alpha = alphas.get(get_pattern_key(list(alphas), name), values.get(f"{PREFIX}lora_alpha", rank))
    return float(alpha) / (math.sqrt(rank) if values.get(f"{PREFIX}use_rslora") else rank)
