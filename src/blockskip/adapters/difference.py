"""Changed weights of a model as their difference to the base, in a file: what full training of some blocks gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from blockskip.adapters.files import DIFFERENCE_NAME, PREFIX, save_sorted
from blockskip.errors import UserError
from blockskip.keys import DIFFERENCE, KIND


def save_difference(
    folder: Path,
    difference: Mapping[str, torch.Tensor],
    header: Mapping[str, str],
    write: Callable[[Path, Callable[[Path], None]], None],
) -> Path:
    """Write a difference, float32, read it back, and return its path.

    Args:
        difference: by the parameters' full names, without prefix.
        header: further texts for the file's header.
        write: how a file is written atomically (``store.files.write_atomically``).

    Raises:
        ValueError: a tensor is not finite; no file is written.
    """
    tensors = {
        PREFIX + name: value.detach().to("cpu", torch.float32).contiguous() for name, value in difference.items()
    }
    broken = [name for name, value in tensors.items() if not bool(torch.isfinite(value).all())]
    if broken:
        raise ValueError(f"the weights have values that are not finite in {broken[0]}")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / DIFFERENCE_NAME
    write(path, lambda temporary: save_sorted(temporary, tensors, {"format": "pt", KIND: DIFFERENCE, **header}))
    with safe_open(path, framework="pt") as saved:
        whole = set(saved.keys()) == set(tensors)
        if not whole or not all(torch.equal(saved.get_tensor(name), value) for name, value in tensors.items()):
            raise ValueError(f'"{path}" does not hold the weights that were written')
    return path


def read_difference(path: Path, key: str = "--lora") -> dict[str, torch.Tensor] | None:
    """The difference in a file, float32, by the parameters' full names; None: the file holds something else.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        with safe_open(path, framework="pt") as stored:
            if (stored.metadata() or {}).get(KIND) != DIFFERENCE:
                return None
            return {name.removeprefix(PREFIX): stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f'{key}: "{path}" cannot be read as safetensors ({error}).') from None
