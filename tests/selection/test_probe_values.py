"""The probe of velocity against a model that is run picture by picture, set by set and noise level by noise level."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from blockskip.adapters.frozen import FrozenAdapters
from blockskip.data.pictures import find_pictures
from blockskip.evaluation.intervals import Values
from blockskip.loading.source import ModelSource
from blockskip.loading.transformer import load_transformer
from blockskip.method.masking import hidden_text, text_attention
from blockskip.method.selection import Masked, masked_sets, single_blocks
from blockskip.preview.denoise import velocity
from blockskip.run.fixed import FixedSamples, fixed_samples
from blockskip.selection.model import Model, open_for
from blockskip.selection.subjects import Subject, Tuned
from blockskip.selection.table import Table
from blockskip.selection.velocity import Velocities, velocity_distances
from blockskip.selection.words import subject_tokens
from tests.adapters.test_frozen import make_lora
from tests.families.groups import CPU
from tests.selection.short import with_short_texts
from tests.selection.small import request

LEVELS = (0.2, 0.8)
SETS = [*masked_sets(8, 2, 0), Masked("window", 2, (2, 3, 4)), *single_blocks(8)[:1]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, flux_folder: Path) -> ModelSource:
    return with_short_texts(flux_folder, tmp_path_factory.mktemp("short") / "flux")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, source: ModelSource) -> tuple[Path, Path]:
    """LoRA of random values, two of them."""
    folder = tmp_path_factory.mktemp("loras")
    one, other = (make_lora(source, folder / str(seed), range(8), seed) for seed in (1, 2))
    return one, other


@pytest.fixture
def model(source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    """The tiny FLUX model, probed at two noise levels with another seed than most have."""
    monkeypatch.setattr("blockskip.selection.velocity.SIGMAS", LEVELS)
    return open_for(request(source.folder, tmp_path, (), seed=3, batch_size=4))


def tuned(folders: tuple[str, str], adapters: tuple[Path, Path], captions: tuple[str, str]) -> list[Tuned]:
    return [
        Tuned(Subject(Path(folder).name, Path(folder), caption, ("{}",)), adapter)
        for folder, adapter, caption in zip(folders, adapters, captions, strict=True)
    ]


def samples_of(model: Model, one: Tuned) -> FixedSamples:
    assert one.subject.images is not None
    paths = find_pictures(one.subject.images)
    return fixed_samples(model.source, paths, [one.subject.caption] * len(paths), model.size, model.dtype, CPU, seed=3)


def tuned_model(model: Model, one: Tuned) -> nn.Module:
    return load_transformer(model.source, [], model.dtype, CPU, FrozenAdapters([str(one.adapter)]))


def norms(model: Model, transformer: nn.Module, samples: FixedSamples) -> Values:
    """|v_masked - v| / |v| (pictures, sigmas, sets), each from two runs of the model."""
    source = model.source
    found = np.zeros((len(samples), len(LEVELS), len(SETS)))

    def predicted(picture: int, sigma: float, blocks: tuple[int, ...]) -> torch.Tensor:
        call = samples.call([picture], sigma, model.dtype, CPU)
        with torch.no_grad(), hidden_text(transformer, source.family.layout, blocks):
            return velocity(transformer, source.family, source.config("transformer"), *call, 1.0)

    for picture in range(len(samples)):
        for level, sigma in enumerate(LEVELS):
            whole = predicted(picture, sigma, ())
            for place, item in enumerate(SETS):
                masked = predicted(picture, sigma, item.blocks)
                found[picture, level, place] = float((masked - whole).norm() / whole.norm())
    return found


def masses(model: Model, transformer: nn.Module, samples: FixedSamples, tokens: torch.Tensor | None) -> Values:
    """Attention probability on these text tokens, or on all, (pictures, sigmas, blocks)."""
    source = model.source
    found = np.zeros((len(samples), len(LEVELS), 8))
    for picture in range(len(samples)):
        for level, sigma in enumerate(LEVELS):
            call = samples.call([picture], sigma, model.dtype, CPU)
            with torch.no_grad(), text_attention(transformer, source.family.layout, range(8), tokens) as mass:
                velocity(transformer, source.family, source.config("transformer"), *call, 1.0)
            found[picture, level] = [float(mass[block][0]) for block in range(8)]
    return found


def probed(model: Model, found: list[Tuned], folder: Path) -> Velocities:
    return velocity_distances(model, found, SETS, Table(folder / "distances.jsonl"))


def places(model: Model, caption: str) -> torch.Tensor:
    """The subject's text tokens, as many bools as the text has."""
    some = subject_tokens(model.source, caption, model.source.text_length)
    assert some is not None and 0 < int(some.sum()) < len(some)
    return torch.nn.functional.pad(some, (0, model.source.text_length - len(some)))


def test_changes_and_attention_are_those_of_each_picture_at_each_level(
    model: Model, subjects: tuple[str, str], adapters: tuple[Path, Path], tmp_path: Path
) -> None:
    """With the adapter's own model, relative to the velocity that saw all text, and of the subject's tokens alone."""
    both = tuned(subjects, adapters, ("a photo of sks red dog", "a photo of sks cat"))
    found = probed(model, both, tmp_path)
    assert found.words == ("sks red dog", "sks cat")
    for number, one in enumerate(both):
        transformer, samples = tuned_model(model, one), samples_of(model, one)
        expected = norms(model, transformer, samples)
        np.testing.assert_allclose(found.distances[number], expected, rtol=1e-3, atol=1e-6)
        assert not found.distances[number, ..., 0].any() and (expected[..., 1:] > 1e-3).all()
        own = masses(model, transformer, samples, places(model, one.subject.caption))
        np.testing.assert_allclose(found.attention[number], own, rtol=1e-4)
    by_level = found.distances[..., 1:].mean((0, 1, 3))
    assert abs(by_level[0] / by_level[1] - 1) > 1e-2  # or one level for all would not be seen
    assert found.by_picture() == pytest.approx((found.distances[:, :, 0] + found.distances[:, :, 1]) / 2)


def test_where_one_adapter_names_no_subject_attention_is_to_all_text(
    model: Model, subjects: tuple[str, str], adapters: tuple[Path, Path], tmp_path: Path
) -> None:
    """For every adapter, or numbers of two kinds would be averaged."""
    both = tuned(subjects, adapters, ("a photo of sks red dog", "sks cat"))
    found = probed(model, both, tmp_path)
    assert found.words == ()
    for number, one in enumerate(both):
        expected = masses(model, tuned_model(model, one), samples_of(model, one), None)
        np.testing.assert_allclose(found.attention[number], expected, rtol=1e-4)


def test_what_was_measured_of_all_text_is_not_taken_for_the_subject_s(
    model: Model, subjects: tuple[str, str], adapters: tuple[Path, Path], tmp_path: Path
) -> None:
    """The same adapter in one table, first beside one without words, then alone; velocities are not computed again."""
    both = tuned(subjects, adapters, ("a photo of sks red dog", "sks cat"))
    whole = probed(model, both, tmp_path)
    lines = len((tmp_path / "distances.jsonl").read_text().splitlines())
    alone = probed(model, both[:1], tmp_path)
    added = [json.loads(line) for line in (tmp_path / "distances.jsonl").read_text().splitlines()[lines:]]
    assert len(added) == 1
    assert alone.words == ("sks red dog",)
    assert np.array_equal(alone.distances[0], whole.distances[0])
    assert (alone.attention[0] < 0.5 * whole.attention[0]).all()


def test_other_sets_of_blocks_are_probed_anew(
    model: Model, subjects: tuple[str, str], adapters: tuple[Path, Path], tmp_path: Path
) -> None:
    """Of one table, as another ratio or window asks for them; the attention stays what it was."""
    one = tuned(subjects, adapters, ("a photo of sks red dog", "a photo of sks cat"))[:1]
    whole, table = probed(model, one, tmp_path), Table(tmp_path / "distances.jsonl")
    fewer = velocity_distances(model, one, SETS[:1] + SETS[2:], table)
    assert fewer.distances.shape[-1] == len(SETS) - 1
    assert fewer.distances == pytest.approx(np.delete(whole.distances, 1, axis=-1), abs=1e-6)
    assert np.array_equal(fewer.attention, whole.attention)
    others = velocity_distances(model, one, [SETS[0], *SETS[:0:-1]], table)  # as many, and not the same
    assert others.distances[..., 1:] == pytest.approx(whole.distances[..., :0:-1], abs=1e-6)
