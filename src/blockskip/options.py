"""Every key of a run as an option of the command line, and what was given: options over a file over a preset."""

from __future__ import annotations

import argparse
import re
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blockskip.presets.cards import read_preset
from blockskip.settings import SHORT, SIZES, UNITS, leaves, read_toml


def option_of(name: str) -> str:
    """The option of a dotted key: ``--train.learning-rate``."""
    return f"--{name.replace('_', '-')}"


#: The options of sizes, in short and in full.
SIZE_OPTIONS = {*map(option_of, SIZES), *(f"--{short}" for short, name in SHORT.items() if name in SIZES)}


def add_settings(parser: argparse.ArgumentParser, several: Sequence[str] = ()) -> None:
    """--config, and every key of a run as an option; of the keys in ``several`` more than one value may be given."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings in TOML")
    parser.add_argument(
        "--preset", metavar="NAME", help="settings for a model and a card, flux/8gb or sana/cpu (blockskip families)"
    )
    common = parser.add_argument_group("in short")
    keys = leaves()
    for short, name in SHORT.items():
        hint, item = keys[name]
        also = f" (the same as {option_of(name)})" if "." in name else ""
        help = item.metadata["help"].replace("%", "%%") + also
        more: dict[str, Any] = {"nargs": "+", "action": "extend"} if name in several else {}
        common.add_argument(f"--{short}", dest=name, default=argparse.SUPPRESS, metavar=_kind(hint), help=help, **more)
    group: Any = parser
    for name, (hint, item) in keys.items():
        section = name.partition(".")[0]
        if "." not in name:
            continue
        if not isinstance(group, argparse._ArgumentGroup) or group.title != f"[{section}]":
            group = parser.add_argument_group(f"[{section}]")
        text = item.metadata["help"].replace("%", "%%")
        shown = f"{text} (default: {item.default})" if item.default not in (None, "", ()) else text
        settings: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": shown}
        if hint is bool:
            group.add_argument(option_of(name), action=argparse.BooleanOptionalAction, **settings)
        elif typing.get_origin(hint) is tuple:
            group.add_argument(option_of(name), nargs="*", metavar="TEXT", **settings)
        elif name in several:
            group.add_argument(option_of(name), nargs="+", action="extend", metavar=_kind(hint), **settings)
        else:
            group.add_argument(option_of(name), metavar=_kind(hint), **settings)


def given_values(given: argparse.Namespace) -> tuple[dict[str, Any], dict[str, str]]:
    """The preset's settings, over them the file's, and over both the options; and whose those are that are no options.

    Raises:
        UserError: the preset or the file cannot be had.
    """
    values: dict[str, Any] = read_preset(given.preset) if given.preset else {}
    origins = dict.fromkeys(values, f"of the preset {given.preset}, which options override,")
    if given.config:
        values |= (found := read_toml(given.config))
        origins |= dict.fromkeys(found, f'in "{given.config}"')
    hints = leaves()
    for name, value in vars(given).items():
        if name in hints:
            values[name] = _typed(value, hints[name][0])
            origins.pop(name, None)
    return values, origins


def joined_sizes(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments with sizes below zero joined to their options, since each alone would be taken for an option.

    What comes with it: a sentence for each size whose unit is a word of its own.
    """
    found: list[str] = []
    problems: list[str] = []
    option = last = ""
    for word in arguments:
        if word.startswith("--"):
            option, _, last = word.partition("=")
        elif option in SIZE_OPTIONS and word.lower() in UNITS and re.fullmatch(r"[\d.,]+", last):
            write = f'write {option} {last}{word} or {option} "{last} {word}"'
            problems.append(f"{option} {last} {word} are two words for one size; {write}.")
        elif option in SIZE_OPTIONS and re.match(r"-[\d.]", word):
            if found[-1] == option:
                found.pop()
            word = f"{option}={word}"
        else:
            last = word
        found.append(word)
    return found, problems


def _typed(value: Any, hint: Any) -> Any:
    """A command-line text as the type of its key; what does not fit is left to the check of the config."""
    if not isinstance(value, str):
        return value
    needed = _without_none(hint)
    if needed is not hint and (not value or (needed is not str and value.lower() == "none")):
        return None
    hint = needed
    if hint in (int, float):
        try:
            return hint(value)
        except ValueError:
            return value
    return value


def _without_none(hint: Any) -> Any:
    """``X`` of ``X | None``; any other type as it is."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return next(item for item in typing.get_args(hint) if item is not type(None))
    return hint


def _kind(hint: Any) -> str:
    hint = _without_none(hint)
    if typing.get_origin(hint) is typing.Literal:
        return "{" + ",".join(str(item) for item in typing.get_args(hint)) + "}"
    return {int: "N", float: "X", str: "TEXT"}.get(hint, "VALUE")
