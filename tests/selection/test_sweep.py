"""Eq. 2's distances against pictures that are drawn one by one: each adapter, prompt, seed and set of blocks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from blockskip.adapters.frozen import FrozenAdapters
from blockskip.encoding.text import encode_prompts
from blockskip.evaluation.intervals import Values
from blockskip.loading.source import ModelSource
from blockskip.method.selection import Masked, masked_sets
from blockskip.preview.draw import Drawing, draw
from blockskip.selection.model import open_for
from blockskip.selection.pictures import picture_distances
from blockskip.selection.subjects import Subject, Tuned
from blockskip.selection.table import Table
from tests.adapters.test_frozen import make_lora
from tests.families.groups import CPU
from tests.selection.short import with_short_texts
from tests.selection.small import Pixels, request

#: Of eight blocks.
SETS = [*masked_sets(8, 1, 0)[:2], Masked("window", 0, (0, 1, 2)), Masked("window", 3, (3, 4, 5, 6, 7))]
#: A byte of a pixel may be rounded the other way in another batch, which moves a distance by less.
ROUNDING = 1e-3


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, flux_folder: Path) -> ModelSource:
    return with_short_texts(flux_folder, tmp_path_factory.mktemp("short") / "flux")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory, source: ModelSource) -> list[Tuned]:
    """Two adapters of random values, which are asked for the same pictures."""
    folder = tmp_path_factory.mktemp("loras")
    loras = [make_lora(source, folder / str(seed), range(8), seed) for seed in (1, 2)]
    prompts = ("a photo of sks dog", "a cat")
    return [Tuned(Subject(f"dog{number}", None, prompts[0], prompts), lora) for number, lora in enumerate(loras)]


def distances(source: ModelSource, folder: Path, tuned: list[Tuned], table: Table, **changes: Any) -> Values:
    changed = {"guidance_scale": 1.0, "seed": 5, "batch_size": 4, **changes}
    model = open_for(request(source.folder, folder, (), **changed))
    return picture_distances(model, tuned, SETS, Pixels(), table, folder / "pictures")


def alone(source: ModelSource, one: Tuned, prompt: str, seed: int, blocks: tuple[int, ...]) -> Image.Image:
    drawing, adapters = Drawing((prompt,), (seed,), 32, 32, 2, 1.0), FrozenAdapters([str(one.adapter)])
    return draw(source, drawing, encode_prompts, torch.float32, CPU, adapters, (blocks,))[0][0]


def cosine(one: Image.Image, other: Image.Image) -> float:
    """Of the bytes around their middle, as `Pixels` has them."""
    a, b = (np.asarray(image, dtype=np.float64).ravel() - 128 for image in (one, other))
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def test_a_distance_is_one_minus_the_cosine_of_two_pictures_of_the_tuned_model(
    source: ModelSource, tuned: list[Tuned], tmp_path: Path
) -> None:
    """Rows are prompts and, inside them, seeds from the request's on; every adapter draws with its own model."""
    found = distances(source, tmp_path, tuned, Table(tmp_path / "distances.jsonl"))
    assert found.shape == (2, 4, len(SETS))
    assert not found[..., 0].round(9).any() and (found[..., 1:] > 3 * ROUNDING).all()
    for number, one in enumerate(tuned):
        for place, (prompt, seed) in enumerate((prompt, seed) for prompt in one.subject.prompts for seed in (5, 6)):
            whole, *masked = (alone(source, one, prompt, seed, item.blocks) for item in SETS)
            expected = [1 - cosine(picture, whole) for picture in masked]
            assert found[number, place, 1:] == pytest.approx(expected, abs=ROUNDING)
    rows = found.reshape(8, len(SETS))  # no two rows are alike, or one could stand for another
    assert min(np.abs(rows[i] - rows[j]).max() for i in range(8) for j in range(i)) > 3 * ROUNDING


@pytest.mark.parametrize("changes", [{"steps": 3}, {"guidance_scale": 3.0}, {"seed": 6}, {"width": 64}])
def test_what_was_drawn_in_another_way_is_drawn_again(
    source: ModelSource, tuned: list[Tuned], tmp_path: Path, changes: dict[str, Any]
) -> None:
    one = [Tuned(Subject("dog", None, "a cat", ("a cat",)), tuned[0].adapter)]
    both = Table(tmp_path / "both.jsonl")
    before = distances(source, tmp_path, one, both)
    after = distances(source, tmp_path, one, both, **changes)
    assert np.array_equal(after, distances(source, tmp_path, one, Table(tmp_path / "new.jsonl"), **changes))
    assert np.abs(after - before).max() > ROUNDING
    assert np.array_equal(distances(source, tmp_path, one, both), before)
