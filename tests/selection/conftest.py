"""What the tests of selections share."""

import shutil
from pathlib import Path

import pytest

from tests.selection.small import Pixels


@pytest.fixture(autouse=True)
def only_what_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder of our own, and no plans of the trainings, which would take longer than they."""
    monkeypatch.setattr("blockskip.run.job.plan_run", lambda prepared: None)
    monkeypatch.setattr("blockskip.selection.job.open_encoder", lambda name, device: Pixels())
    monkeypatch.setattr("blockskip.selection.validate.open_encoder", lambda name, device: Pixels())


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory, photos: Path) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("subjects")
    for name in ("red_dog", "cat"):
        (folder / name).mkdir()
        for photo in sorted(path for path in photos.iterdir() if path.suffix != ".txt")[:2]:
            shutil.copy(photo, folder / name)
    return str(folder / "red_dog"), str(folder / "cat")
