"""Settings read, checked and written: TOML files and dotted keys to the typed classes of ``config``, and back."""

from __future__ import annotations

import dataclasses
import difflib
import math
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import tomli_w

from blockskip.config import Config
from blockskip.errors import UserError

#: Settings that have a name of their own on the command line and in Python.
SHORT = {
    "model": "model.path", "images": "data.images", "prompt": "data.prompt", "output": "output", "steps": "train.steps",
    "resolution": "data.resolution", "skip": "skip.ratio", "rank": "lora.rank", "seed": "train.seed",
    "device": "train.device", "memory": "memory.device", "host-memory": "memory.host", "disk": "memory.disk",
}  # fmt: skip
#: Keys whose values are sizes.
SIZES = ("features.window", "features.disk", "memory.device", "memory.host", "memory.disk")
#: Bytes by their names.
UNITS = {
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "b": 1,
}  # fmt: skip


def leaves(cls: type = Config, prefix: str = "") -> dict[str, tuple[Any, dataclasses.Field[Any]]]:
    """Every key, dotted, with its type and field: ``{"train.steps": (int, Field), ...}``."""
    hints = typing.get_type_hints(cls)
    found: dict[str, tuple[Any, dataclasses.Field[Any]]] = {}
    for item in fields(cls):
        hint = hints[item.name]
        if dataclasses.is_dataclass(hint):
            found |= leaves(typing.cast(type, hint), f"{prefix}{item.name}.")
        else:
            found[prefix + item.name] = (hint, item)
    return found


def from_flat(values: dict[str, Any]) -> Config:
    """A checked config from dotted keys.

    Raises:
        UserError: every unknown key, wrong type, unknown choice and value out of bounds, all at once.
    """
    known, problems, tree = leaves(), [], {}  # type: ignore[var-annotated]
    for name, value in values.items():
        if name not in known:
            problems.append(f'"{name}" is not a setting{_nearest(name, list(known))}.')
            continue
        hint, item = known[name]
        try:
            checked = _check(name, value, hint, item.metadata)
        except ValueError as error:
            problems.append(str(error))
            continue
        section, _, leaf = name.rpartition(".")
        tree.setdefault(section, {})[leaf] = checked
    if problems:
        raise UserError(problems + wrong_sizes(values))
    sections = {
        name: typing.cast(Any, hint)(**tree.get(name, {}))
        for name, hint in typing.get_type_hints(Config).items()
        if dataclasses.is_dataclass(hint)
    }
    return Config(**sections, **tree.get("", {}))


def read_toml(path: Path) -> dict[str, Any]:
    """The dotted keys of a TOML file.

    Raises:
        UserError: the file is missing or is not TOML.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f'The config file "{path}" cannot be read: {error.strerror}.') from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f'The config file "{path}" is not valid TOML: {error}.') from None
    flat: dict[str, Any] = {}
    for name, value in document.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{leaf}": item for leaf, item in value.items()}
        else:
            flat[name] = value
    return flat


def to_flat(config: Config) -> dict[str, Any]:
    """Every dotted key with its value; the inverse of ``from_flat``."""
    found = {}
    for name in leaves():
        value: Any = config
        for part in name.split("."):
            value = getattr(value, part)
        found[name] = value
    return found


def to_toml(config: Config) -> str:
    """The config as TOML; keys that are None are left out (TOML has no null; absent means the default)."""
    document: dict[str, Any] = {}
    for name, value in to_flat(config).items():
        if value is None:
            continue
        section, _, leaf = name.rpartition(".")
        target = document.setdefault(section, {}) if section else document
        target[leaf] = list(value) if isinstance(value, tuple) else value
    return tomli_w.dumps(document)


def size_in_bytes(name: str, text: str) -> int:
    """Bytes from a size such as ``512MiB``, ``8GiB``, ``8GB`` or ``1e9B``.

    Raises:
        UserError: the text is no size, or has no unit; the sentence names the key.
    """
    lowered = text.strip().lower()
    unit = next((unit for unit in UNITS if lowered.endswith(unit)), "")
    try:
        amount = float(lowered.removesuffix(unit)) * UNITS.get(unit, 1)
        if not 0 < amount < 1e18:
            raise ValueError
    except ValueError:
        raise UserError(f'{name} = "{text}" is not a size; write for example "512MiB" or "8GiB".') from None
    if not unit:
        raise UserError(f'{name} = "{text}" has no unit; write for example "512MiB" or "8GiB".')
    return int(amount)


def wrong_sizes(values: Mapping[str, Any]) -> list[str]:
    """A sentence for each of the ``SIZES`` among dotted keys that is none."""
    problems: list[str] = []
    for name in SIZES:
        if isinstance(text := values.get(name), str) and text:
            try:
                size_in_bytes(name, text)
            except UserError as error:
                problems += error.problems
    return problems


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, 1, 0.5)
    near = near or [item for item in known if item.rpartition(".")[2] == name.rpartition(".")[2]][:1]
    return f'; did you mean "{near[0]}"' if near else ""


def _check(name: str, value: Any, hint: Any, bounds: Any) -> Any:
    if isinstance(hint, types.UnionType) or get_origin(hint) is typing.Union:
        choices = [item for item in get_args(hint) if item is not type(None)]
        return None if value is None or value == "" else _check(name, value, choices[0], bounds)
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            allowed = ", ".join(f'"{item}"' for item in get_args(hint))
            near = _nearest(str(value), list(get_args(hint)))
            raise ValueError(f'{name} = "{value}" is not one of {allowed}{near}.')
        return value
    if get_origin(hint) is tuple:
        if isinstance(value, str) or not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
            raise ValueError(f"{name} must be a list of texts, not {value!r}.")
        return tuple(value)
    if hint is bool:
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, not {value!r}.")
        return value
    if hint is str:
        if not isinstance(value, str):
            raise ValueError(f"{name} must be a text, not {value!r}.")
        return value
    kind = "a whole number" if hint is int else "a number"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be {kind}, not {value!r}.")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, not {value!r}.")
    number = hint(value)
    if number != value:
        raise ValueError(f"{name} must be {kind}, not {value!r}.")
    if "low" in bounds and number < bounds["low"]:
        raise ValueError(f"{name} = {value} is too small; it must be at least {bounds['low']}.")
    if "above" in bounds and number <= bounds["above"]:
        raise ValueError(f"{name} = {value} is too small; it must be above {bounds['above']}.")
    if "high" in bounds and number > bounds["high"]:
        raise ValueError(f"{name} = {value} is too large; it must be at most {bounds['high']}.")
    return number
