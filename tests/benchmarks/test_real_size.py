"""The benchmark of runs at real size: its path on a small model, its table, its record and its targets."""

import json
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import real_size
from benchmarks.memory_measured import Row
from benchmarks.real_size import RUNS, Line, Run, in_document, merged, read, text_of, verdicts
from tools.make_random_checkpoint import checkpoint_bytes

MODEL = "builtin-sana"
SMALL = {"data.resolution": 64, "data.text_length": 16}
Usage = namedtuple("Usage", "total used free")


def line(model: str, run: str, phase: str, measured: float = 1.0, **more: int) -> Line:
    row = Row(
        "folder",
        phase,
        real_size.GIB,
        int(measured * real_size.GIB),
        real_size.GIB // 2,
        real_size.GIB // 4,
        real_size.GIB // 2,
        seconds=6.0,
        **more,
    )
    return Line(model, run, 2, row)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """One small model with one run and one target; a document and a record of its own."""
    runs = {MODEL: {"50%": Run(SMALL | {"skip.ratio": 0.5}, ("precompute", "train"))}}
    monkeypatch.setattr(real_size, "RUNS", runs)
    monkeypatch.setattr(real_size, "TARGETS", (real_size.Target(MODEL, "50%", ("train",), 2 * real_size.GIB),))
    monkeypatch.setattr(real_size, "FILE", tmp_path / "real_size.json")
    monkeypatch.setattr(real_size, "DOCUMENT", tmp_path / "memory.md")
    (tmp_path / "memory.md").write_text(f"before\n{real_size.BEGIN}old{real_size.END}\nafter\n")
    return tmp_path


def test_a_run_of_a_random_checkpoint_is_measured_phase_by_phase(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = real_size.main(["--model", MODEL, "--device", "cpu", "--keep", str(small / "kept"), "--update"])
    phases = {one.row.phase: one for one in lines}
    assert [*phases] == ["encode text", "encode pictures", "precompute", "train"]
    assert [one.samples for one in lines] == [1, 2, 2, 2]
    assert all(one.row.planned > 0 and one.row.measured > 0 and one.row.seconds > 0 for one in lines)
    assert (small / "kept" / MODEL / "model_index.json").is_file(), "it stays"
    assert "builtin-sana, 50%, at most 2.00 GiB: train 0." in capsys.readouterr().out
    document = (small / "memory.md").read_text()
    assert document == f"before\n{real_size.BEGIN}{text_of(lines, markdown=True)}{real_size.END}\nafter\n"
    assert document.count("| encode text |") == 0, "the table leaves it out"
    assert read(small / "real_size.json") == lines


def test_a_checkpoint_is_removed_unless_it_is_kept(small: Path) -> None:
    with real_size.checkpoint(MODEL, None) as folder:
        assert folder is not None and (folder / "transformer" / "config.json").is_file()
    assert not folder.exists()


def test_a_folder_of_something_else_is_left_alone(small: Path) -> None:
    (small / "kept" / MODEL).mkdir(parents=True)
    (small / "kept" / MODEL / "notes.txt").touch()
    with pytest.raises(SystemExit, match=f"is not a checkpoint of {MODEL}; give --keep another folder"):
        real_size.main(["--model", MODEL, "--keep", str(small / "kept")])
    assert [path.name for path in (small / "kept" / MODEL).iterdir()] == ["notes.txt"]
    assert real_size.SETTINGS["memory.return_freed"], "as the document says"


def test_a_model_is_left_out_where_the_disk_is_small(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = checkpoint_bytes(MODEL) + real_size.SPARE
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2**50, 2**50, needed - 1))
    assert real_size.main(["--model", MODEL, "--keep", str(small / "kept")]) == []
    assert f"{MODEL} is left out: it takes 6.0" in capsys.readouterr().out
    assert not (small / "kept" / MODEL).exists()


def test_the_table_says_what_was_measured() -> None:
    run, *_ = RUNS["sana-0.6b"]
    headings, cells = real_size.cells_of([line("sana-0.6b", run, "train", 1.5)])
    assert dict(zip(headings, cells[0], strict=True)) == {
        "model": "sana-0.6b", "run": run, "phase": "train", "planned": "1.00", "measured": "1.50", "difference": "+50%",
        "private": "0.50", "mapped": "0.25", "seconds": "3.0",
    }  # fmt: skip
    headings, cells = real_size.cells_of(
        [line("sana-0.6b", run, "train", device_planned=real_size.GIB, allocated=2 * real_size.GIB)]
    )
    assert headings[-5:] == ("device planned", "allocated", "difference", "reserved", "device-wide")
    assert cells[0][-5:] == ("1024", "2048", "+100%", "0", "–")


def test_targets_are_met_by_every_phase_or_not_at_all() -> None:
    target = next(target for target in real_size.TARGETS if len(target.phases) > 2)
    lines = [line(target.model, target.run, phase, 1.2) for phase in target.phases]
    assert verdicts(lines)[0].endswith("preview 1.20: met.")
    lines[2] = line(target.model, target.run, target.phases[2], 1.21)
    assert verdicts(lines)[0].endswith("not met in precompute.")
    assert verdicts(lines[:-1])[0].endswith("not met in precompute, preview."), "what is not measured is not met"
    assert verdicts([line("sana-1.6b", target.run, "train")]) == []


def test_new_lines_take_the_place_of_those_of_the_same_run() -> None:
    first, second = [*RUNS["sana-0.6b"]][:2]
    old = [line("sana-0.6b", first, "train", 1.0), line("sana-0.6b", second, "train", 1.0)]
    new = [line("sana-0.6b", second, "train", 2.0), line("flux", next(iter(RUNS["flux"])), "train", 3.0)]
    assert merged(old, new) == [old[0], *new]
    assert merged(new, [replace(old[0], samples=5)]) == [replace(old[0], samples=5), *new]


def test_the_document_shows_the_record() -> None:
    document = real_size.DOCUMENT.read_text(encoding="utf-8")
    assert in_document(document, text_of(read(), markdown=True)) == document
    assert json.loads(real_size.FILE.read_text(encoding="utf-8"))
