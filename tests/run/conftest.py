"""What the tests of whole runs share: two small pipelines, and runs of them."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.run.runs import Runs
from tests.tiny import make_flux, make_sana


@pytest.fixture(scope="session", autouse=True)
def quick_runs() -> Iterator[None]:
    """What makes runs of tiny models take a second.

    One thread: more of them wait for each other, and for whatever else the machine does. And what the libraries made at
    their import is left out of garbage collection, since a run collects after every phase.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def small_flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A FluxPipeline with 2 double and 2 single blocks; read it only."""
    return make_flux(tmp_path_factory.mktemp("models") / "small-flux", layers=2, single_layers=2)


@pytest.fixture(scope="session")
def small_sana(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SanaPipeline with 4 blocks; read it only."""
    return make_sana(tmp_path_factory.mktemp("models") / "small-sana", layers=4)


@pytest.fixture(scope="session")
def flux_runs(tmp_path_factory: pytest.TempPathFactory, small_flux: Path, photos: Path) -> Runs:
    """Runs of the small FLUX."""
    return Runs(tmp_path_factory.mktemp("flux-runs"), small_flux, photos)


@pytest.fixture(scope="session")
def sana_runs(tmp_path_factory: pytest.TempPathFactory, small_sana: Path, photos: Path) -> Runs:
    """Runs of the small SANA."""
    return Runs(tmp_path_factory.mktemp("sana-runs"), small_sana, photos)


@pytest.fixture(params=["flux", "sana"])
def runs(request: pytest.FixtureRequest) -> Runs:
    """Both families, one after the other."""
    found: Runs = request.getfixturevalue(f"{request.param}_runs")
    return found
