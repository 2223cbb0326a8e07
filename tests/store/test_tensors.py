"""The file of a group: the safetensors format, exact, with every byte checked."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from blockskip.store.tensors import DamagedFile, check_header, read_tensors, write_tensors

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16]
DTYPES += [torch.int8, torch.uint8, torch.bool]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Equal names, dtypes, shapes and bits (NaNs included)."""
    return one.keys() == other.keys() and all(
        (one[name].dtype, one[name].shape, bits(one[name])) == (other[name].dtype, other[name].shape, bits(other[name]))
        for name in one
    )


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """A few tensors of any bits, dtype, shape (empty and scalar too) and layout."""
    found = {}
    for name in draw(
        st.lists(st.text(max_size=8).filter(lambda text: text != "__metadata__"), max_size=4, unique=True)
    ):
        dtype = draw(st.sampled_from(DTYPES))
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
        top = 2 if dtype == torch.bool else 256
        size = (*shape, torch.empty((), dtype=dtype).element_size())
        tensor = torch.randint(0, top, size, generator=generator, dtype=torch.uint8).view(dtype).squeeze(-1)
        found[name] = tensor.T if len(shape) == 2 and draw(st.booleans()) else tensor
    return found


@limits(max_examples=50)
@given(stored=tensors(), about=st.text(max_size=20))
def test_what_is_read_is_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, stored: dict[str, torch.Tensor], about: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "a.safetensors"
    write_tensors(path, stored, {"about": about})
    read, metadata = read_tensors(path)
    assert same(read, stored)
    assert metadata == {"about": about}
    assert check_header(path)["about"] == about
    assert same(load_file(path), stored)  # by the safetensors library
    with safe_open(path, "pt") as opened:
        assert opened.metadata()["about"] == about


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn, torch.uint16])
def test_other_dtypes_are_refused_before_anything_is_written(tmp_path: Path, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match='"a" of torch'):
        write_tensors(tmp_path / "a", {"a": torch.zeros(2, dtype=dtype)}, {})
    with pytest.raises(ValueError, match="__metadata__"):
        write_tensors(tmp_path / "a", {"__metadata__": torch.zeros(2)}, {})
    assert list(tmp_path.iterdir()) == []


def test_tensors_with_a_gradient_and_views_of_one_storage_are_stored(tmp_path: Path) -> None:
    base = torch.randn(6, 4, requires_grad=True)
    stored = {"whole": base, "part": base[1:3, ::2], "again": base}
    write_tensors(tmp_path / "a", stored, {})
    assert same(read_tensors(tmp_path / "a")[0], {name: tensor.detach() for name, tensor in stored.items()})


def test_reading_copies_into_buffers_that_fit_and_only_those(tmp_path: Path) -> None:
    stored = {
        "a": torch.randn(3, 4),
        "b": torch.randn(2).bfloat16(),
        "c": torch.arange(4),
        "d": torch.randn(2, 3),
        "e": torch.randn(5),
    }
    write_tensors(tmp_path / "a", stored, {})
    into = {
        "a": torch.zeros(3, 4),
        "b": torch.zeros(2, dtype=torch.float16),
        "c": torch.zeros(5, dtype=torch.int64),
        "d": torch.zeros(3, 2).T,
        "e": torch.zeros(5, requires_grad=True),
        "unknown": torch.zeros(1),
    }
    read, _ = read_tensors(tmp_path / "a", into)
    assert same(read, stored)
    assert {name for name in read if read[name].data_ptr() == into[name].data_ptr()} == {"a"}
    (tmp_path / "a").unlink()  # nothing is mapped
    assert same(read, stored)
    read["a"].zero_()


def change_header(path: Path, change: Callable[[dict[str, dict[str, object]]], object]) -> None:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def rewrite(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(change(path.read_bytes()))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (rewrite(lambda content: b""), "it is empty"),
    "seven bytes": (rewrite(lambda content: content[:7]), "no whole safetensors header"),
    "cut in the header": (rewrite(lambda content: content[:40]), "no whole safetensors header"),
    "cut in the tensors": (rewrite(lambda content: content[:-1]), "bytes instead of"),
    "longer": (rewrite(lambda content: content + b"\0"), "bytes instead of"),
    "another kind": (rewrite(lambda content: b"PK\3\4" + content[4:]), "no whole safetensors header"),
    "zeros": (rewrite(lambda content: bytes(len(content))), "not one that was written here"),
    "no JSON": (rewrite(lambda content: content[:8] + b"[" + content[9:]), "not one that was written here"),
    "a huge header": (
        rewrite(lambda content: (2**40).to_bytes(8, "little") + content[8:]),
        "no whole safetensors header",
    ),
    "last byte flipped": (rewrite(lambda content: content[:-1] + bytes([content[-1] ^ 1])), 'the bytes of "b"'),
    "a tensor missing": (lambda path: change_header(path, lambda header: header.pop("b")), 'the tensor "b" is missing'),
    "a tensor too many": (
        lambda path: change_header(path, lambda header: header.update(c={**header["b"]})),
        "not the one that was written",
    ),
    "other shape": (lambda path: change_header(path, lambda header: header["a"].update(shape=[3, 2])), "not the one"),
    "other dtype": (lambda path: change_header(path, lambda header: header["b"].update(dtype="F16")), "not the one"),
    "other remark": (
        lambda path: change_header(path, lambda header: header["__metadata__"].update(key="x")),
        "not the one that was written",
    ),
    "no checksums": (lambda path: save_file(load_file(path), path), "not one that was written here"),
    "no metadata": (lambda path: change_header(path, lambda header: header.pop("__metadata__")), "not one that was"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(tmp_path: Path, name: str) -> None:
    damage, reason = DAMAGE[name]
    path = tmp_path / "a"
    write_tensors(path, {"a": torch.randn(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}, {"key": "ab"})
    read_tensors(path)
    damage(path)
    with pytest.raises(DamagedFile, match=reason):
        read_tensors(path)


@given(place=st.integers(0, 10**6), flip=st.integers(1, 255))
def test_no_changed_byte_goes_unseen(tmp_path_factory: pytest.TempPathFactory, place: int, flip: int) -> None:
    path = tmp_path_factory.getbasetemp() / "b.safetensors"
    stored = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    write_tensors(path, stored, {"key": "ab"})
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= flip
    path.write_bytes(content)
    try:
        read, metadata = read_tensors(path)
    except DamagedFile:
        return
    assert same(read, stored)  # one white space of the header for another
    assert metadata == {"key": "ab"}


@given(length=st.integers(0, 10**6))
def test_no_cut_goes_unseen(tmp_path_factory: pytest.TempPathFactory, length: int) -> None:
    path = tmp_path_factory.getbasetemp() / "c.safetensors"
    write_tensors(path, {"a": torch.arange(6.0)}, {})
    content = path.read_bytes()
    path.write_bytes(content[: length % len(content)])
    for read in (read_tensors, check_header):
        with pytest.raises(DamagedFile):
            read(path)
