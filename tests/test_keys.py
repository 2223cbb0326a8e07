"""Keys of stored results: the same for the same argument in every process, another one for every other argument."""

import hashlib
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockskip import keys
from blockskip.keys import FORMATS, file_sha256, key


@dataclass(frozen=True)
class Inner:
    size: tuple[int, int] = (64, 32)


@dataclass(frozen=True)
class Argument:
    text: str = "a dog"
    number: int = 1
    sigma: float = 0.5
    flag: bool = False
    none: None = None
    parts: tuple[Inner, ...] = (Inner(), Inner((1, 2)))
    named: dict[str, int] = field(default_factory=lambda: {"a": 1, "b": 2})


@dataclass(frozen=True)
class Other(Argument):
    pass


def test_a_key_is_always_the_same() -> None:
    """Fixed here so that a change of the way keys are made does not pass unseen; FORMATS is raised for one."""
    assert key("features", Argument()) == key("features", Argument())
    assert key("text", Inner()) == hashlib.sha256(
        b'["text", 1, {"size": [64, 32], "type": "Inner"}]'
    ).hexdigest()[:32]  # fmt: skip
    assert key("features", Argument(named={"b": 2, "a": 1})) == key("features", Argument())


CHANGES: list[dict[str, Any]] = [
    {"text": "a dog "}, {"text": "a dög"}, {"number": 2}, {"number": -1}, {"sigma": math.nextafter(0.5, 1)},
    {"flag": True}, {"sigma": -0.0}, {"sigma": 0.0}, {"flag": 0}, {"flag": None}, {"none": 0}, {"none": "None"},
    {"number": "1"},
    {"parts": ()}, {"parts": (Inner((1, 2)), Inner())}, {"parts": (Inner(), Inner((1, 3)))}, {"named": {"a": 1}},
    {"named": {"a": 2, "b": 1}}, {"number": 1.0},
]  # fmt: skip


def test_every_field_counts() -> None:
    found = [key("features", replace(Argument(), **change)) for change in CHANGES]
    found += [key("features", Argument()), key("pixels", Argument()), key("features", Other())]
    assert len(set(found)) == len(found)


def test_the_format_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key("features", Argument())
    monkeypatch.setattr(keys, "FORMATS", FORMATS | {"features": FORMATS["features"] + 1})
    assert key("features", Argument()) != before
    with pytest.raises(KeyError):
        key("no phase", Argument())


@given(st.floats(allow_nan=False), st.floats(allow_nan=False))
def test_floats_count_by_their_bits(one: float, other: float) -> None:
    same = one.hex() == other.hex()
    assert (key("features", Argument(sigma=one)) == key("features", Argument(sigma=other))) == same


@pytest.mark.parametrize("value", [Path("x"), b"x", object(), {1, 2}, Inner])
def test_what_has_no_canonical_form_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="a key is made of plain values"):
        key("features", Argument(text=value))  # type: ignore[arg-type]


def test_a_file_is_hashed_in_pieces(tmp_path: Path) -> None:
    content = bytes(range(256)) * (5 * 2**12)  # 5 MiB: more than a piece
    for data in (b"", b"x", content):
        (tmp_path / "file").write_bytes(data)
        assert file_sha256(tmp_path / "file") == hashlib.sha256(data).hexdigest()
