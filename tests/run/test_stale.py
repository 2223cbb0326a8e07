"""The cache: what is changed is computed anew, exactly that, and nothing when nothing is changed."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

from blockskip.data.schedule import Group
from blockskip.errors import RunError
from blockskip.run import Prepared, prepare
from blockskip.run.job import _Job
from blockskip.settings import SHORT, from_flat
from tests.run.runs import PROMPT, Run, Runs, Written

STEPS = 3
GROUPS = 2 * STEPS
CAPTION = "sks dog in the snow"

RULE = """
from blockskip.method.skipping import ConstantResidual

class Mine(ConstantResidual):
    pass
"""


class Computed(Exception):
    """The features are there; the run need not train."""


@dataclass
class Case:
    """A warm cache and what it was made from, all of it in a folder that may be changed."""

    folder: Path
    settings: dict[str, Any]
    prepared: Prepared

    @property
    def photos(self) -> Path:
        return self.folder / "photos"

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def groups(self, wanted: Callable[[Group], bool]) -> int:
        """How many groups a condition holds for."""
        return sum(map(wanted, self.prepared.schedule.groups))

    def showing(self, name: str) -> int:
        """How many groups show a picture."""
        pictures = self.prepared.schedule.pictures
        return self.groups(lambda group: any(pictures[s.picture].path.name == name for s in group.samples))

    def recomputed(self, **changes: Any) -> tuple[int, int, int]:
        """Texts, groups of latents and groups of features that a changed run computes."""
        with Written() as written, patch.object(_Job, "_train", side_effect=Computed), pytest.raises(Computed):
            Runs(self.folder / "runs", self.model, self.photos)(**self.settings | changes)
        return written.counts


@pytest.fixture(scope="module")
def warm(flux_runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("warm")
    shutil.copytree(flux_runs.model, folder / "model")
    (folder / "photos").mkdir()
    for name in ("1.png", "3.png", "4.png"):
        shutil.copy2(flux_runs.images / name, folder / "photos")
    (folder / "photos" / "3.txt").write_text(CAPTION, encoding="utf-8")
    settings = {"train__steps": STEPS, "features__cache": folder / "cache"}
    case = Case(folder, settings, prepare(_config(folder, flux_runs, **settings)))
    assert case.recomputed() == (2, GROUPS, GROUPS)
    return case


@pytest.fixture
def case(warm: Case, tmp_path: Path) -> Case:
    shutil.copytree(warm.folder, tmp_path / "copy")
    return Case(tmp_path / "copy", warm.settings | {"features__cache": tmp_path / "copy" / "cache"}, warm.prepared)


def _config(folder: Path, runs: Runs, **changes: Any) -> Any:
    given = runs.settings(output=folder / "none", model=folder / "model", images=folder / "photos", **changes)
    return from_flat({
        SHORT.get(name, name.replace("__", ".")): str(value) if isinstance(value, Path) else value
        for name, value in given.items()
    })  # fmt: skip


def touch(path: Path, change: Callable[[], object]) -> None:
    """Change a file but not its size and its time."""
    before = path.stat()
    change()
    assert path.stat().st_size == before.st_size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def nudge(file: Path) -> None:
    """Change one weight in a file by a little."""
    tensors = load_file(file)
    name = max(name for name, value in tensors.items() if value.ndim == 2)
    tensors[name][0, 0] += 0.01
    save_file(tensors, file, metadata={"format": "pt"})


def test_nothing_is_changed(case: Case) -> None:
    """Also by a copy of model, pictures and cache in another folder (this one), and by another name of a picture."""
    assert case.recomputed() == (0, 0, 0)
    (case.photos / "1.png").rename(case.photos / "0 another name.png")
    assert case.recomputed() == (0, 0, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"lora__rank": 8}, {"lora__targets": ["to_q"]}, {"train__learning_rate": 1.0}, {"train__max_grad_norm": 0.0},
        {"features__window": "1B"}, {"train__gradient_checkpointing": True}, {"preview__prompts": ["a dog"]},
        {"train__steps": STEPS - 1}, {"model__dtype": "float32"}, {"lora__dropout": 0.0},
    ],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_settings_of_the_training_alone(warm: Case, changes: dict[str, Any]) -> None:
    assert warm.recomputed(**changes) == (0, 0, 0)


def test_more_steps(case: Case) -> None:
    assert case.recomputed(train__steps=STEPS + 1) == (0, 2, 2)


def test_a_pixel(case: Case) -> None:
    """A file of the same size and time: uncompressed, one value changed."""
    for path in sorted(case.photos.glob("*.png")):
        with Image.open(path) as image:
            image.convert("RGB").save(path.with_suffix(".bmp"))
        path.unlink()
    shown = case.showing("1.png")
    assert 0 < shown < GROUPS
    assert case.recomputed() == (0, GROUPS, GROUPS)  # other bytes: all are other pictures
    assert case.recomputed() == (0, 0, 0)
    file = case.photos / "1.bmp"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    touch(file, lambda: file.write_bytes(content))
    assert case.recomputed() == (0, shown, shown)


def test_a_caption(case: Case) -> None:
    file, shown = case.photos / "3.txt", case.showing("3.png")
    touch(file, lambda: file.write_text(CAPTION.replace("snow", "sand"), encoding="utf-8"))
    assert case.recomputed() == (1, 0, shown)


def test_the_prompt(case: Case) -> None:
    assert case.recomputed(prompt=f"{PROMPT}!") == (1, 0, GROUPS - case.showing("3.png"))
    file = case.photos / "3.txt"
    file.write_text(PROMPT, encoding="utf-8")
    assert case.recomputed() == (0, 0, case.showing("3.png"))


@pytest.mark.parametrize("changes", [{"data__resolution": 40}, {"data__full_resolution": 96}, {"train__seed": 1}])
def test_resolution_and_seed(case: Case, changes: dict[str, Any]) -> None:
    assert case.recomputed(**changes) == (0, GROUPS, GROUPS)


def test_positions_of_patches(case: Case) -> None:
    """Those of the features are other ones, and the same again the second time."""
    changes = {"patches__positions": "picture"}
    assert case.recomputed(**changes) == (0, 0, GROUPS)
    assert case.recomputed(**changes) == (0, 0, 0)


def test_sigma(case: Case, flux_runs: Runs) -> None:
    """Patches follow sigma, so those whose box has moved are encoded again; all features are."""
    changes = {"train__steps": STEPS, "sigma__shift": 3.0}
    other = prepare(_config(case.folder, flux_runs, **changes)).schedule
    pairs = list(zip(case.prepared.schedule.groups, other.groups, strict=True))
    moved = sum([s.box for s in before.samples] != [s.box for s in after.samples] for before, after in pairs)
    assert 0 < moved < GROUPS
    assert case.recomputed(sigma__shift=3.0) == (0, moved, GROUPS)
    assert case.recomputed(sigma__distribution="logit-normal")[2] == GROUPS


def test_flip(case: Case, flux_runs: Runs) -> None:
    other = prepare(_config(case.folder, flux_runs, train__steps=STEPS, data__flip=True)).schedule
    mirrored = sum(group.samples[0].flip for group in other.groups)
    assert 0 < mirrored < GROUPS
    assert case.recomputed(data__flip=True) == (0, mirrored, mirrored)


def test_caption_dropout(case: Case, flux_runs: Runs) -> None:
    other = prepare(_config(case.folder, flux_runs, train__steps=STEPS, data__caption_dropout=0.8)).schedule
    dropped = sum(not group.samples[0].caption for group in other.groups)
    assert 0 < dropped < GROUPS
    assert case.recomputed(data__caption_dropout=0.8) == (1, 0, dropped)


def test_text_length(case: Case) -> None:
    assert case.recomputed(data__text_length=13) == (2, 0, GROUPS)


def test_dtype(case: Case) -> None:
    assert case.recomputed(model__dtype="bfloat16") == (2, GROUPS, GROUPS)


@pytest.mark.parametrize("changes", [{"skip__front": 2, "skip__tail": 1}, {"skip__front": 1, "skip__tail": 0}])
def test_the_split(case: Case, changes: dict[str, Any]) -> None:
    assert case.recomputed(**changes) == (0, 0, GROUPS)


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ("transformer", (0, 0, GROUPS)), ("vae", (0, GROUPS, GROUPS)), ("text_encoder", (2, 0, GROUPS)),
        ("text_encoder_2", (2, 0, GROUPS)),
    ],
)  # fmt: skip
def test_a_weight_of_the_model(case: Case, part: str, expected: tuple[int, int, int]) -> None:
    (file,) = (case.model / part).glob("*.safetensors")
    assert case.recomputed() == (0, 0, 0)  # the file was read and its hash remembered
    size = file.stat().st_size
    nudge(file)
    assert file.stat().st_size == size
    assert case.recomputed() == expected


def test_a_tokenizer(case: Case) -> None:
    file = case.model / "tokenizer_2" / "tokenizer_config.json"
    file.write_text(file.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    assert case.recomputed() == (2, 0, GROUPS)


def test_a_base_adapter(case: Case, flux_runs: Runs, tmp_path: Path) -> None:
    file = tmp_path / "older.safetensors"
    shutil.copy(Run(flux_runs.once().output).file, file)
    changes = {"model__base_adapters": [file]}
    assert case.recomputed(**changes) == (0, 0, GROUPS)
    assert case.recomputed(**changes) == (0, 0, 0)
    nudge(file)
    assert case.recomputed(**changes) == (0, 0, GROUPS)
    assert case.recomputed() == (0, 0, 0)


def test_a_rule(case: Case, tmp_path: Path) -> None:
    file = tmp_path / "rule.py"
    file.write_text(RULE, encoding="utf-8")
    changes = {"skip__rule": f"{file}:Mine"}
    assert case.recomputed(**changes) == (0, 0, GROUPS)
    file.write_text(f"{RULE}\n", encoding="utf-8")
    assert case.recomputed(**changes) == (0, 0, GROUPS)
    assert case.recomputed(**changes) == (0, 0, 0)
    assert case.recomputed(skip__rule="none") == (0, 0, 0)  # needs no features


def test_a_lost_or_cut_entry(case: Case) -> None:
    for name in ("text", "pixels", "features"):
        first, second, *_ = sorted((case.folder / "cache" / name).glob("*.safetensors"))
        first.unlink()
        second.write_bytes(second.read_bytes()[:-1])
    assert case.recomputed() == (2, 2, 2)


def test_a_damaged_entry_is_named(case: Case) -> None:
    file = sorted((case.folder / "cache" / "features").glob("*.safetensors"))[0]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    touch(file, lambda: file.write_bytes(content))
    runs, output = Runs(case.folder / "runs", case.model, case.photos), case.folder / "out"
    with pytest.raises(RunError, match=r"the bytes of .* are not those that were written; run the command again"):
        runs(output, **case.settings)
    assert not file.exists()  # so that the same command goes on
    with Written() as written:
        run = runs(output, **case.settings)
    assert written.counts == (0, 0, 1)
    assert run.file.is_file()
