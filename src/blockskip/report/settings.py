"""The settings of a run as a report shows them: without the paths of the machine they were made on."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import tomli_w

#: Keys whose values are always paths.
PATHS = ("output", "data.images", "data.class_images", "features.cache", "model.transformer", "model.base_adapters")
#: What shows that any other text is one: a root, a drive, a home, a relative beginning, or a backslash.
_LOCAL = re.compile(r"^(/|~|\.{1,2}([/\\]|$)|[A-Za-z]:[/\\]|file:)|\\")


def without_paths(config_toml: str) -> str:
    """The same TOML with every path of this machine cut down to its last name; hub ids stay. Empty if it is no TOML."""
    try:
        document = tomllib.loads(config_toml)
    except tomllib.TOMLDecodeError:
        return ""
    shown: str = tomli_w.dumps(_walk("", document))
    return shown


def _walk(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _walk(f"{key}.{name}" if key else name, item) for name, item in value.items()}
    if isinstance(value, list):
        return [_walk(key, item) for item in value]
    if isinstance(value, str) and (key in PATHS or _LOCAL.search(value)):
        return re.split(r"[/\\]", value.rstrip("/\\"))[-1]
    return value
