"""The folders that single files are converted to: whole or absent, made once, in little memory, where there is room."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import save_file

from blockskip.errors import UserError
from blockskip.loading import converted, weights
from blockskip.loading.converted import converted_folder, linked_folder
from blockskip.loading.source import ModelSource, open_model
from blockskip.loading.unread import unread_tensors
from blockskip.loading.weights import Weights, file_identity
from blockskip.measure import Meter
from tests.originals import transformer_state, write_original

MIB = 1 << 20


@pytest.fixture
def source(flux_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSource:
    """FLUX from an original file, a cache that is empty, and shards of a few tensors."""
    monkeypatch.setenv("BLOCKSKIP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(converted, "SHARD", 100_000)
    return open_model(
        str(flux_folder), transformer=str(write_original("flux", flux_folder, tmp_path / "flux1.safetensors"))
    )


def places(tmp_path: Path) -> list[str]:
    """What there is of transformers in the cache."""
    return sorted(path.suffix for path in (tmp_path / "cache" / "transformers").iterdir())


def whole(folder: Path, flux_folder: Path) -> bool:
    """The tensors are those of the pipeline, and nothing else lies there."""
    stored, expected = Weights(folder), transformer_state(flux_folder)
    found = stored.read(stored.files)
    kinds = {path.suffix for path in folder.iterdir()}
    return kinds == {".safetensors", ".json"} and found.keys() == expected.keys() and all(
        torch.equal(found[name], value) for name, value in expected.items()
    )  # fmt: skip


def test_shards_are_an_ordinary_diffusers_folder(
    source: ModelSource, flux_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = source.part_folder("transformer")
    told = capsys.readouterr().out
    assert str(folder) in told and "Converting flux1.safetensors to diffusers' layout, once: " in told
    assert whole(folder, flux_folder) and places(tmp_path) == [""]
    index = json.loads((folder / converted.INDEX).read_text(encoding="utf-8"))
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 5 and set(index["weight_map"].values()) == {shard.name for shard in shards}
    assert index["metadata"]["total_size"] == sum(v.numel() * 4 for v in transformer_state(flux_folder).values())
    # the blocks lie in the order of the model, so that few shards are of any one of them
    block = [index["weight_map"][name] for name in index["weight_map"] if name.startswith("transformer_blocks.1.")]
    assert len(set(block)) <= 3
    model = diffusers.FluxTransformer2DModel.from_pretrained(folder)
    assert all(torch.equal(model.state_dict()[name], v) for name, v in transformer_state(flux_folder).items())
    assert (folder / "config.json").read_bytes() == (flux_folder / "transformer" / "config.json").read_bytes()


def test_a_shard_is_the_file_that_safetensors_writes(tmp_path: Path) -> None:
    tensors = {f"b{n}.{kind}.weight": torch.randn(n, 3).to(kind) for n in (1, 2, 10, 3)
               for kind in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}  # fmt: skip
    tensors = {name.replace("torch.", ""): value for name, value in tensors.items()} | {"none": torch.zeros(0, 4)}
    save_file(tensors | {"one": torch.tensor(1.5)}, tmp_path / "expected.safetensors", metadata={"format": "pt"})
    unread = unread_tensors(tmp_path / "expected.safetensors")
    digest = converted._write(
        tmp_path / "written.safetensors", tmp_path / "part", dict(sorted(unread.items(), reverse=True))
    )
    written = (tmp_path / "written.safetensors").read_bytes()
    assert written == (tmp_path / "expected.safetensors").read_bytes()
    assert digest == hashlib.sha256(written).hexdigest()


def test_it_is_made_once_and_its_hashes_are_known(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = source.part_folder("transformer")
    capsys.readouterr()
    monkeypatch.setattr(weights, "file_sha256", lambda file: pytest.fail(f"{file} is hashed"))
    monkeypatch.setattr(converted, "_write", lambda *_: pytest.fail("written again"))
    again = open_model(source.name, transformer=str(tmp_path / "flux1.safetensors"))
    assert again.part_folder("transformer") == folder and not capsys.readouterr().out
    for shard in folder.glob("*.safetensors"):
        assert file_identity(shard) == hashlib.sha256(shard.read_bytes()).hexdigest()


def test_the_folder_is_named_by_the_file_the_config_and_the_converter(
    source: ModelSource, flux_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, config = tmp_path / "flux1.safetensors", tmp_path / "config.json"
    config.write_bytes((flux_folder / "transformer" / "config.json").read_bytes())
    assert source.single is not None

    def place() -> Path:
        return converted_folder(file, config, "FluxTransformer2DModel", source.single.tensors)  # type: ignore[union-attr]

    first = place()
    assert place() == first == source.part_folder("transformer")
    config.write_text(config.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    second = place()
    monkeypatch.setattr(diffusers, "__version__", "99.0")
    third = place()
    os.utime(file, ns=(1, 1))
    assert place() == third
    tensors = unread_tensors(file)
    save_file({name: value.read() + 1 for name, value in tensors.items()}, file)
    assert len({first, second, third, place()}) == 4
    assert len({linked_folder(path, config) for path in (file, file, config)}) == 2


#: Converts its argument without opening the pipeline. ``third`` is called in the middle of the third shard.
PROCESS = """
import os, signal, sys, time, types
from pathlib import Path
sys.modules["diffusers"] = types.SimpleNamespace(__version__=sys.argv[2])  # its version is all that is needed
from blockskip.loading import converted, unread
converted.SHARD = 100_000
fsync, left = os.fsync, [3]
def watched(descriptor):
    left[0] -= 1
    if not left[0]:
        third(descriptor)
    fsync(descriptor)
os.fsync = watched
folder = Path(sys.argv[1])
def run():
    tensors = unread.unread_tensors(folder / "mine.safetensors")
    print(converted.converted_folder(folder / "mine.safetensors", folder / "config.json", "Any", tensors))
"""


class Mine:
    """A file in diffusers' names that is converted all the same, here or in another process; three shards and more."""

    def __init__(self, source: ModelSource, folder: Path) -> None:
        assert source.single is not None
        self.folder = folder
        save_file({name: value.read() for name, value in source.single.tensors.items()}, folder / "mine.safetensors")
        (folder / "config.json").write_bytes(source.single.config.read_bytes())

    def here(self) -> Path:
        """Convert it in this process."""
        file = self.folder / "mine.safetensors"
        return converted_folder(file, self.folder / "config.json", "Any", unread_tensors(file))

    def elsewhere(self, third: str) -> subprocess.Popen[str]:
        """A process that converts it."""
        program = f"{PROCESS}\ndef third(descriptor):\n{textwrap.indent(third, '    ')}\nrun()\n"
        command = [sys.executable, "-c", program, str(self.folder), diffusers.__version__]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture
def mine(source: ModelSource, tmp_path: Path) -> Mine:
    return Mine(source, tmp_path)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
def test_a_killed_conversion_leaves_nothing_half_and_goes_on(
    mine: Mine, flux_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = mine.elsewhere("os.ftruncate(descriptor, 1000)\nos.kill(os.getpid(), signal.SIGKILL)")
    assert process.wait(300) == -signal.SIGKILL
    assert places(tmp_path) == [".half", ".lock", ".part", ".pid"]
    assert len(list(tmp_path.glob("cache/transformers/*.half/*.safetensors"))) == 2
    written = count_writes(monkeypatch)
    folder = mine.here()
    assert whole(folder, flux_folder) and places(tmp_path) == [""]
    assert len(written) == len(list(folder.glob("*.safetensors"))) - 2
    for shard in folder.glob("*.safetensors"):
        assert file_identity(shard) == hashlib.sha256(shard.read_bytes()).hexdigest()


def count_writes(monkeypatch: pytest.MonkeyPatch, before: Callable[[int], object] = lambda number: None) -> list[str]:
    """The names of the shards that are written from now on; ``before`` is called with the number of each."""
    written: list[str] = []
    original = converted._write

    def write(path: Path, *args: Any) -> str:
        written.append(path.name)
        before(len(written))
        return original(path, *args)

    monkeypatch.setattr(converted, "_write", write)
    return written


def test_one_that_is_interrupted_goes_on(
    source: ModelSource, flux_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(number: int) -> None:
        if number == 4:
            raise KeyboardInterrupt

    written = count_writes(monkeypatch, interrupt)
    with pytest.raises(KeyboardInterrupt):
        source.part_folder("transformer")
    assert places(tmp_path) == [".half"]
    assert whole(source.part_folder("transformer"), flux_folder)
    assert written.count(written[3]) == 2 and len(set(written)) == len(written) - 1


def test_of_two_at_once_one_waits(
    mine: Mine, flux_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process has written two shards and is in the third when this one comes; it goes on when it is told to."""
    process = mine.elsewhere("(folder / 'third').touch()\nwhile not (folder / 'go').exists():\n    time.sleep(0.01)")
    while not (tmp_path / "third").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    told = []

    def go(*texts: object) -> None:
        told.extend(texts)
        (tmp_path / "go").touch()

    written, copy = count_writes(monkeypatch), converted._copy
    monkeypatch.setattr(converted, "say", go)
    monkeypatch.setattr(converted, "_copy", lambda *paths: (go(), process.wait(60), copy(*paths)))  # was it overtaken?
    folder = mine.here()
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out.splitlines()[-1:]) == (0, [str(folder)]), out
    assert told == [f"Waiting for process {process.pid}, which converts mine.safetensors."] and written == []
    assert whole(folder, flux_folder) and places(tmp_path) == [""]


def test_where_there_are_no_locks_two_at_once_do_no_harm(
    source: ModelSource, flux_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process begins while this one writes its second shard, and is done first."""
    other = open_model(source.name, transformer=str(tmp_path / "flux1.safetensors"))
    folders, written, fsync = [], [], os.fsync

    def overtake(descriptor: int) -> None:
        written.append(descriptor)
        if len(written) == 2:
            with monkeypatch.context() as another:
                another.setattr(os, "getpid", lambda: 1)
                folders.append(other.part_folder("transformer"))
        fsync(descriptor)

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(os, "fsync", overtake)
    monkeypatch.setattr("filelock.FileLock.acquire", refuse)
    folder = source.part_folder("transformer")
    assert folders == [folder] and whole(folder, flux_folder) and places(tmp_path) == [""]


def test_a_disk_without_room_is_told_before_anything_is_written(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(converted.shutil, "disk_usage", lambda folder: usage(500_000))  # type: ignore[attr-defined]
    with pytest.raises(
        UserError, match=r"takes 8\d\d KiB, and 488 KiB are free: set the .* BLOCKSKIP_CACHE to a folder"
    ):
        source.part_folder("transformer")
    assert not list(tmp_path.glob("cache/transformers/*/*"))


def test_a_cache_that_cannot_be_written_is_told(
    source: ModelSource, flux_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("BLOCKSKIP_CACHE", str(tmp_path / "file" / "cache"))
    name = "diffusion_pytorch_model.safetensors"
    plain = open_model(source.name, transformer=str(flux_folder / "transformer" / name))
    for opened in (source, plain):
        with pytest.raises(UserError, match=r"cannot be converted in .*\(Not a directory\); set the env"):
            opened.part_folder("transformer")


def test_memory_is_that_of_a_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Private and mapped together, of a file of 192 MiB whose tensors are divided and joined anew."""
    monkeypatch.setenv("BLOCKSKIP_CACHE", str(tmp_path / "cache"))
    tensors = {f"blocks.{number}.qkv.weight": torch.randn(6 * 1024, 512) for number in range(16)}
    save_file(tensors, tmp_path / "file.safetensors")
    torch.save(tensors, tmp_path / "file.pth")
    (tmp_path / "config.json").write_text("{}")
    del tensors
    for kind, limit in (("safetensors", 64), ("pth", 100)):  # of the latter, a shard stays mapped
        file = tmp_path / f"file.{kind}"
        found = {}
        for name, value in unread_tensors(file).items():
            query, *others = torch.chunk(value, 3)
            found[name.replace("qkv", "to_q")] = torch.cat([query])
            found[name.replace("qkv", "to_kv")] = torch.cat(others[::-1])
        file_identity(file)
        monkeypatch.setattr(converted, "SHARD", 24 * MIB)
        meter = Meter(torch.device("cpu"))
        with meter.phase("convert"):
            folder = converted_folder(file, tmp_path / "config.json", kind, found)
        (record,) = meter.records()
        assert sum(path.stat().st_size for path in folder.iterdir()) > 190 * MIB
        assert record.host_peak < limit * MIB
