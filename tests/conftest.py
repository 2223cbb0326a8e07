"""What all tests share: no hub, a fixed seed, tiny pipelines and photos, and a line now and then on how far it is."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
os.environ.setdefault("MPLBACKEND", "Agg")

import gc
import random
import time
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
import transformers
from hypothesis import settings

from blockskip.loading.source import ModelSource, open_model
from tests.tiny import make_flux, make_photos, make_sana

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


@pytest.fixture(scope="session")
def flux_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny FluxPipeline (3 double, 5 single blocks, no guidance embedding); read it only."""
    return make_flux(tmp_path_factory.mktemp("models") / "flux")


@pytest.fixture(scope="session")
def sana_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny SanaPipeline (6 blocks); read it only."""
    return make_sana(tmp_path_factory.mktemp("models") / "sana")


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five pictures of one subject (sizes, kinds and the EXIF case: see `make_photos`); read it only."""
    return make_photos(tmp_path_factory.mktemp("pictures") / "photos")


@pytest.fixture(scope="session")
def guided_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny FluxPipeline like FLUX.1-dev: guidance embedding, sigmas shifted by token count; read it only."""
    return make_flux(tmp_path_factory.mktemp("models") / "guided", layers=2, single_layers=2, guidance=True)


@pytest.fixture(scope="session")
def flux(flux_folder: Path) -> ModelSource:
    """`flux_folder`, opened."""
    return open_model(str(flux_folder))


@pytest.fixture(scope="session")
def sana(sana_folder: Path) -> ModelSource:
    """`sana_folder`, opened."""
    return open_model(str(sana_folder))


@pytest.fixture(scope="session")
def guided(guided_folder: Path) -> ModelSource:
    """`guided_folder`, opened."""
    return open_model(str(guided_folder))


@pytest.fixture(params=["flux", "sana"])
def source(request: pytest.FixtureRequest) -> ModelSource:
    """Both families, one after the other."""
    found: ModelSource = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="session", autouse=True)
def remembered_hashes(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Hashes of the tests' weights are remembered in a folder of the tests, not in the user's own."""
    os.environ["BLOCKSKIP_CACHE"] = str(tmp_path_factory.mktemp("cache"))
