"""A benchmark of a tiny model: cut off it goes on, rows do not depend on each other, bad input is told first."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image

from blockskip.benchmark import job, processes, worker
from blockskip.benchmark.job import Outcome, benchmark
from blockskip.benchmark.model import open_for
from blockskip.benchmark.parts import Part, parts
from blockskip.benchmark.request import Request
from blockskip.benchmark.subjects import subjects
from blockskip.errors import RunError, UserError
from blockskip.training.loop import Trainer

SMALL: dict[str, Any] = {
    "settings": ("blockskip-50",), "count": None, "images": 1, "points": 1, "steps": 2, "height": 32, "width": 32,
    "encoders": ("pixels",),
    "training": {
        "train.steps": 4, "train.learning_rate": 1e-2, "lora.rank": 2, "data.full_resolution": 64,
        "data.text_length": 12, "train.gradient_accumulation_steps": 1,
    },
}  # fmt: skip
#: What differs between two equal runs.
MEASURED = ("seconds", "memory", "phases", "disk_bytes")


class Pixels:
    """An encoder that forgets nothing: the picture's own bytes, centred."""

    name = "pixels"

    def embed(self, images: list[Image.Image]) -> torch.Tensor:
        rows = torch.stack([torch.from_numpy(np.array(image.resize((32, 32)))).double().flatten() for image in images])
        return torch.nn.functional.normalize(rows - 128, dim=1)


class Here:
    """A part that is done in this process when it is begun; the names of all of them."""

    begun: ClassVar[list[str]] = []

    def __init__(self, part: Part, threads: int) -> None:
        part.folder.mkdir(parents=True, exist_ok=True)
        self.begun.append(part.name)
        worker.work(json.loads(json.dumps(part.task)))

    def poll(self) -> int:
        return 0

    def stop(self) -> None:
        raise AssertionError("it is done")


def make_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan, one other prompt, an encoder of our own, and everything in this process."""
    monkeypatch.setattr("blockskip.benchmark.instruments.open_encoder", lambda name, device: Pixels())
    monkeypatch.setattr("blockskip.run.job.plan_run", lambda prepared: None)
    monkeypatch.setattr(worker, "OTHER_PROMPTS", ("a dog",))
    begin_with(monkeypatch, Here)
    monkeypatch.setattr(Here, "begun", [])


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)


def begin_with(monkeypatch: pytest.MonkeyPatch, start: Callable[[Part, int], Any]) -> None:
    monkeypatch.setattr(job, "do", lambda parts, jobs, seconds: processes.do(parts, jobs, seconds, start))


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, photos: Path) -> Path:
    folder = tmp_path_factory.mktemp("subjects")
    for name in ("red_dog", "cat2"):
        shutil.copytree(photos, folder / name)
    (folder / "prompts.txt").write_text("# two\na photo of {} in the snow\n{} on the beach\n")
    return folder


def request(folder: Path, own: Path, output: Path, **changes: Any) -> Request:
    return Request(**{"model": str(folder), "subjects_from": str(own), "output": str(output), **SMALL, **changes})


def read(outcome: Outcome) -> dict[tuple[str, str], dict[str, Any]]:
    """The lines by setting and subject, without what differs between two equal runs."""
    found = {}
    for text in outcome.results.read_text().splitlines():
        row = json.loads(text)
        row["run"] = {name: value for name, value in row.get("run", {}).items() if name not in MEASURED}
        found[row["setting"], row["subject"]] = row
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, flux_folder: Path, own: Path) -> tuple[Request, Outcome]:
    with pytest.MonkeyPatch.context() as patched:
        make_small(patched)
        asked = request(flux_folder, own, tmp_path_factory.mktemp("whole") / "benchmark")
        return asked, benchmark(asked, jobs=1)


def test_every_row_has_its_measures_memory_and_time(whole: tuple[Request, Outcome]) -> None:
    asked, outcome = whole
    rows = read(outcome)
    names = ("cat2", "red_dog")
    assert list(rows) == [(setting, name) for name in names for setting in ("base", "lora", "blockskip-50")]
    for (setting, _), row in rows.items():
        assert list(row["heldout"]) == ["64x64", "32x32"] and all(len(v) == 9 for v in row["heldout"].values())
        assert len(row["fidelity"]["pixels"]["drawable"]) == len(row["fidelity"]["pixels"]["real"]) == 2
        assert row["model"]["identity"] and row["versions"]["torch"] == torch.__version__
        if setting != "base":
            assert len(row["drift"]["pixels"]) == 1 and [point["step"] for point in row["curve"]] == [2, 4]
            assert row["run"]["config"]["train.steps"] == 4 and row["run"]["config"]["data.full_resolution"] == 64
    plain, skipped = rows["lora", "cat2"], rows["blockskip-50", "cat2"]
    assert plain["run"]["split"] == [0, 0] and sum(skipped["run"]["split"]) == 4
    assert plain["heldout"] != skipped["heldout"] != rows["base", "cat2"]["heldout"]
    assert plain["curve"][0]["heldout"] != plain["curve"][1]["heldout"]
    assert str(asked.folder) not in outcome.results.read_text() and '"model.path"' not in outcome.results.read_text()
    for name in ("table.md", "memory.png", "steps.png", "sheets/cat2.png", "sheets/red_dog.png"):
        assert (asked.folder / name).is_file()
    lines = [json.loads(text) for text in outcome.results.read_text().splitlines()]
    assert all(row["run"]["memory"]["host"] > 0 < row["run"]["seconds"]["all"] for row in lines if "run" in row)
    planned = {row["setting"]: row["run"]["memory"]["train_host_planned"] for row in lines if "run" in row}
    assert set(planned) == {"lora", "blockskip-50"} and set(planned.values()) == {0}  # these runs have no plan
    assert not list((asked.folder / "runs").rglob("checkpoints"))


def test_a_finished_benchmark_is_read_and_not_repeated(whole: tuple[Request, Outcome]) -> None:
    asked, outcome = whole
    before, text = outcome.results.read_bytes(), outcome.text
    again = benchmark(asked, jobs=1)
    assert Here.begun == [] and again.finished
    assert again.results.read_bytes() == before and again.text == text


def test_a_row_does_not_depend_on_the_others(
    whole: tuple[Request, Outcome], tmp_path: Path, flux_folder: Path, own: Path
) -> None:
    """Asked for alone, elsewhere, with other rows before it: the same figures."""
    _, outcome = whole
    alone = benchmark(request(flux_folder, own, tmp_path / "alone", subjects=("red_dog",)), jobs=1)
    rows, expected = read(alone), read(outcome)
    assert set(rows) == {(setting, "red_dog") for setting in ("base", "lora", "blockskip-50")}
    assert all(rows[place] == expected[place] for place in rows)
    Here.begun.clear()
    more = benchmark(replace(request(flux_folder, own, tmp_path / "alone", subjects=("red_dog",)),
                             settings=("resize", "blockskip-50")), jobs=1)  # fmt: skip
    assert Here.begun == ["resize, red_dog"]
    assert all(read(more)[place] == expected[place] for place in rows)


def test_an_interrupted_benchmark_goes_on_where_it_was(
    whole: tuple[Request, Outcome], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flux_folder: Path, own: Path
) -> None:
    """Cut off in the middle of a run, after a checkpoint: what comes out is what an uninterrupted one gives."""
    whole_checkpoint = Trainer.checkpoint

    def cut_off(trainer: Trainer) -> None:
        whole_checkpoint(trainer)
        raise KeyboardInterrupt

    asked = request(flux_folder, own, tmp_path / "cut", subjects=("cat2",))
    with monkeypatch.context() as inside:
        inside.setattr(Trainer, "checkpoint", cut_off)
        with pytest.raises(KeyboardInterrupt):
            benchmark(asked, jobs=1)
    (folder,) = (asked.folder / "runs" / "lora").iterdir()
    assert (folder / "checkpoints" / "step-000002").is_dir() and not (folder / "trained.json").exists()
    assert set(read(Outcome(False, "", asked.folder / "results.jsonl"))) == {("base", "cat2")}
    Here.begun.clear()
    rows, expected = read(benchmark(asked, jobs=1)), read(whole[1])
    assert Here.begun == ["lora, cat2", "blockskip-50, cat2"]
    assert all(rows[place] == expected[place] for place in rows)


def test_other_encoders_neither_train_nor_draw_again(
    whole: tuple[Request, Outcome], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked, outcome = whole
    shutil.copytree(asked.folder, tmp_path / "copy")
    monkeypatch.setattr("blockskip.benchmark.trained.run", lambda prepared: pytest.fail("trained again"))
    monkeypatch.setattr("blockskip.benchmark.drawn.draw", lambda *args: pytest.fail("drawn again"))
    monkeypatch.setattr("blockskip.benchmark.drawn.heldout_loss", lambda *args, **more: pytest.fail("measured again"))
    monkeypatch.setattr(Pixels, "name", "others")
    found = benchmark(replace(asked, output=str(tmp_path / "copy"), encoders=("others",)), jobs=1)
    for place, row in read(found).items():
        assert row["fidelity"]["others"] == read(outcome)[place]["fidelity"]["pixels"]
        assert row["heldout"] == read(outcome)[place]["heldout"]


def test_adapters_that_belong_to_the_base_act_in_everything_that_is_drawn(
    whole: tuple[Request, Outcome], tmp_path: Path
) -> None:
    asked, outcome = whole
    (learnt,) = (asked.folder / "runs" / "lora").glob("cat2-*/adapter/*.safetensors")
    training = {**asked.training, "model.base_adapters": [str(learnt)]}
    model = open_for(replace(asked, output=str(tmp_path / "out"), training=training))
    plain = [part.key for part in parts(open_for(asked), [], subjects(asked))]
    others, base, _ = parts(model, [], subjects(asked))
    assert not {others.key, base.key} & set(plain)
    Here(base, 1)
    found = base.result()
    assert found is not None and found["heldout"] == read(outcome)["lora", "cat2"]["heldout"]


def test_the_time_limit_stops_it_and_the_same_command_goes_on(
    whole: tuple[Request, Outcome], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two of seven parts are done in time; a part that is running is told to stop."""
    asked, outcome = whole
    shutil.copytree(asked.folder, tmp_path / "copy")
    copy = replace(asked, output=str(tmp_path / "copy"))
    for path in (tmp_path / "copy").rglob("result.json"):
        path.unlink()
    now, stopped = [0.0], []

    class Slow(Here):
        def __init__(self, part: Part, threads: int) -> None:
            self.part, self.began = part, now[0]

        def poll(self) -> int | None:
            now[0] += 20
            if now[0] - self.began < 60:
                return None
            super().__init__(self.part, 1)
            return 0

        def stop(self) -> None:
            stopped.append(self.part.name)

    monkeypatch.setattr(processes.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(processes.time, "sleep", lambda seconds: None)
    begin_with(monkeypatch, Slow)
    first = benchmark(copy, jobs=1, minutes=2.5)
    assert not first.finished and stopped == ["lora, cat2"]
    assert Here.begun == ["the base on other prompts", "the base, cat2"] and set(read(first)) == {("base", "cat2")}
    second = benchmark(copy, jobs=1)
    assert second.finished and read(second) == read(outcome)
    assert Here.begun[2:] == ["lora, cat2", "blockskip-50, cat2", "the base, red_dog", "lora, red_dog",
                              "blockskip-50, red_dog"]  # fmt: skip


def test_a_row_that_fails_is_told_and_the_others_are_done(
    whole: tuple[Request, Outcome], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked, _ = whole
    shutil.copytree(asked.folder, tmp_path / "copy")
    for path in (tmp_path / "copy").rglob("result.json"):
        path.unlink()

    class Failing(Here):
        def __init__(self, part: Part, threads: int) -> None:
            self.code = 1 if part.name == "lora, cat2" else 0
            if self.code:
                (part.folder / "log.txt").write_text("blockskip: no more   paper\n\n")
            else:
                super().__init__(part, threads)

        def poll(self) -> int:
            return self.code

    begin_with(monkeypatch, Failing)
    with pytest.raises(RunError, match=r"lora, cat2 failed; .*: blockskip: no more paper"):
        benchmark(replace(asked, output=str(tmp_path / "copy")), jobs=1)
    rows = read(Outcome(False, "", tmp_path / "copy" / "results.jsonl"))
    assert len(rows) == 5 and ("lora", "cat2") not in rows


def test_the_other_baselines_are_rows_like_any(whole: tuple[Request, Outcome], tmp_path: Path) -> None:
    """Full weights of random blocks, blocks skipped inside, A frozen, LoRA in some blocks only: all are measured."""
    asked, _ = whole
    shutil.copytree(asked.folder, tmp_path / "copy")
    names = ("kept-50", "lora-fa", "lisa", "hollow-30")
    rows = read(benchmark(replace(asked, output=str(tmp_path / "copy"), settings=names, subjects=("cat2",)), jobs=1))
    assert [name for name, _ in rows] == ["base", "lora", *names]
    assert rows["hollow-30", "cat2"]["run"]["skipped"] == [3, 4] and rows["kept-50", "cat2"]["run"]["skipped"] == [
        0,
        1,
        2,
        7,
    ]
    losses = [row["heldout"]["64x64"] for row in rows.values()]
    assert all(a != b for place, a in enumerate(losses) for b in losses[:place])
    early = [row["curve"][0]["heldout"]["64x64"] for name, row in rows.items() if name[0] != "base"]
    assert all(first not in losses for first in early)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"settings": ("foo",)}, '--settings "foo" is not one of core, all, lora'),
        ({"subjects": ("cow",)}, '--subjects "cow" has no folder'),
        ({"subjects_from": "nowhere"}, '--subjects-from "nowhere" is no folder'),
        ({"subjects_from": None}, "--subjects-from is missing"),
        ({"seeds": (0, 0)}, "--seeds"),
        ({"images": 0}, "--images must be at least 1"),
        ({"which": "all"}, '--set "all" is not one of development, test'),
        ({"height": 33}, "--height = 33 is no multiple"),
        ({"dtype": "int8"}, "--dtype"),
        ({"device": "gpu"}, "--device"),
        ({"model": "nowhere"}, "model.path"),
        ({"training": {"skip.ratio": 0.3}}, "skip.ratio cannot be set here"),
        ({"training": {"train.stepz": 3}}, '"train.stepz" is not a setting'),
        ({"training": {"train.steps": 0}}, "train.steps = 0"),
    ],
)
def test_what_cannot_be_used_is_told_first(
    tmp_path: Path, flux_folder: Path, own: Path, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        benchmark(request(flux_folder, own, tmp_path / "out", **changes), jobs=1)
    assert Here.begun == [] and not (tmp_path / "out" / "runs").exists()
