"""Settings for a model and a card that ship with the package: ``flux/8gb`` is ``presets/flux/8gb.toml``.

They are what the planner chose, written by ``python -m benchmarks.presets --update``.
"""

from __future__ import annotations

import difflib
import functools
from pathlib import Path
from typing import Any

from blockskip.errors import UserError
from blockskip.settings import read_toml

FOLDER = Path(__file__).parent


def preset_names() -> tuple[str, ...]:
    """All of them, ``model/card``: models by name, cards from small to large, the CPU last."""
    found = [(path.parent.name, path.stem) for path in FOLDER.glob("*/*.toml")]
    found.sort(key=lambda item: (item[0], int(item[1].removesuffix("gb")) if item[1] != "cpu" else 1000))
    return tuple(f"{model}/{card}" for model, card in found)


def read_preset(name: str) -> dict[str, Any]:
    """The settings of a preset, by their dotted keys.

    Raises:
        UserError: there is none of that name; the sentence says which there are.
    """
    names = preset_names()
    if name not in names:
        raise UserError(f'"{name}" is not a preset{_hint(name, names)}.')
    return read_toml(FOLDER / f"{name}.toml")


@functools.cache
def presets_by_model() -> dict[str, tuple[str, ...]]:
    """Names of presets in their order, by the ``model.path`` that they have."""
    found: dict[str, tuple[str, ...]] = {}
    for name in preset_names():
        model = read_toml(FOLDER / f"{name}.toml")["model.path"]
        found[model] = (*found.get(model, ()), name)
    return found


def _hint(name: str, names: tuple[str, ...]) -> str:
    model = name.partition("/")[0]
    cards = [item.partition("/")[2] for item in names if item.partition("/")[0] == model]
    if cards:
        return f"; of {model} there are {', '.join(cards)}"
    near = difflib.get_close_matches(name, names, 1, 0.5)
    models = ", ".join(dict.fromkeys(item.partition("/")[0] for item in names))
    return f'; did you mean "{near[0]}"' if near else f"; write model/card, with a model of {models}"
