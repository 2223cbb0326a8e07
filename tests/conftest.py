"""What all tests share: no hub, a fixed seed, tiny pipelines and photos, and a line now and then on how far it is."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
os.environ.setdefault("MPLBACKEND", "Agg")

import gc
import random
import time
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import transformers
from hypothesis import settings

from blockskip.loading.source import ModelSource, open_model
from tests.tiny import make_flux, make_photos
from tests.tiny_families import ALIKE, TINY
from tests.tiny_families.pixart import make_pixart
from tests.tiny_families.sd3 import make_sd3

diffusers.utils.logging.disable_progress_bar()
transformers.utils.logging.disable_progress_bar()
if threads := os.environ.get("OMP_NUM_THREADS"):
    torch.set_num_threads(int(threads))
settings.register_profile("house", deadline=None, derandomize=True, database=None)
settings.load_profile("house")


class Progress:
    """Says now and then how many tests are done, how long it took and about how long is left."""

    interval = 15.0  # seconds between two lines

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.begun = self.last = time.monotonic()
        self.total = self.done = 0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.total = len(session.items)
        self.begun = self.last = time.monotonic()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.total = len(ids)  # each worker collects all tests, and they share them

    def pytest_runtest_logfinish(self) -> None:
        self.done += 1
        now = time.monotonic()
        if now - self.last < self.interval:
            return
        self.last = now
        gone = now - self.begun
        left = gone / self.done * (self.total - self.done)
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.ensure_newline()
            reporter.write_line(
                f"    {self.done} of {self.total} tests in {_minutes(gone)}, about {_minutes(left)} left", cyan=True
            )


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what the imports made is looked at no more: a collection takes milliseconds instead of half a second


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Progress(config), "blockskip-progress")


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Start every test from the same global random state, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def _family(name: str) -> tuple[Any, Any]:
    """The fixtures `<name>_folder`, a family's tiny pipeline, and `<name>`, the same opened; read it only."""

    @pytest.fixture(scope="session", name=f"{name}_folder")
    def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return TINY[name].make(tmp_path_factory.mktemp("models") / name)

    @pytest.fixture(scope="session", name=name)
    def opened(request: pytest.FixtureRequest) -> ModelSource:
        return open_model(str(request.getfixturevalue(f"{name}_folder")))

    return folder, opened


# flux_folder and flux, sana_folder and sana, sd3_folder and sd3, ...
for _name in TINY:
    globals()[f"{_name}_folder"], globals()[_name] = _family(_name)


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five pictures of one subject (sizes, kinds and the EXIF case: see `make_photos`); read it only."""
    return make_photos(tmp_path_factory.mktemp("pictures") / "photos")


@pytest.fixture(scope="session")
def guided_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny FluxPipeline like FLUX.1-dev: guidance embedding, sigmas shifted by token count; read it only."""
    return make_flux(tmp_path_factory.mktemp("models") / "guided", layers=2, single_layers=2, guidance=True)


@pytest.fixture(scope="session")
def guided(guided_folder: Path) -> ModelSource:
    """`guided_folder`, opened."""
    return open_model(str(guided_folder))


@pytest.fixture(scope="session")
def sd3_bare(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    """Stable Diffusion 3 like 3 medium, without T5; read it only."""
    return open_model(str(make_sd3(tmp_path_factory.mktemp("models") / "sd3-bare", with_t5=False)))


@pytest.fixture(scope="session")
def pixart_told(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    """PixArt-Alpha like the one of 1024 px, which is told a picture's size; read it only."""
    folder = tmp_path_factory.mktemp("models") / "pixart-told"
    return open_model(str(make_pixart(folder, layers=2, alpha=True, told_size=True)))


@pytest.fixture(params=[name for name in TINY if name not in ALIKE])
def source(request: pytest.FixtureRequest) -> ModelSource:
    """Every family, one after the other."""
    found: ModelSource = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="session", autouse=True)
def remembered_hashes(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Hashes of the tests' weights are remembered in a folder of the tests, not in the user's own."""
    os.environ["BLOCKSKIP_CACHE"] = str(tmp_path_factory.mktemp("cache"))
