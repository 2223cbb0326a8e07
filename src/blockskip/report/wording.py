"""Texts of other people (names, prompts) made safe to show: no control characters, no more room than there is."""

from __future__ import annotations

import unicodedata


def clean(text: str) -> str:
    """The text without control characters, direction overrides and lone surrogates; emoji keep their joiners."""
    return "".join(c for c in text if c in "\n\t\u200d" or unicodedata.category(c) not in ("Cc", "Cf", "Cs"))


def width(text: str) -> int:
    """Columns that a text takes on a terminal: wide characters two, combining ones and joiners none."""
    return sum(_cells(character) for character in text)


def shorten(text: str, most: int) -> str:
    """The clean text on one line of at most ``most`` columns."""
    plain = " ".join(clean(text).split())
    if width(plain) <= most:
        return plain
    kept, taken = "", 0
    for character in plain:
        taken += _cells(character)
        if taken > most - 1:
            break
        kept += character
    return kept.rstrip() + "\N{HORIZONTAL ELLIPSIS}"


def _cells(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
