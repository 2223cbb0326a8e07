"""What the figures show, read from what is drawn into them."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from blockskip.evaluation.intervals import Values
from blockskip.loading.source import ModelSource
from blockskip.method.selection import masked_sets, single_blocks
from blockskip.selection import figures
from blockskip.selection.job import select
from blockskip.selection.result import Sweep
from blockskip.selection.subjects import Subject, Tuned
from blockskip.selection.velocity import SIGMAS, Velocities
from tests.adapters.test_frozen import make_lora
from tests.selection.small import request

SETS = [*masked_sets(8, 4, 3), *single_blocks(8)]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Every figure that is written."""
    found: list[Figure] = []
    save = Figure.savefig

    def keep(self: Figure, *arguments: object, **options: object) -> None:
        found.append(self)
        save(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Figure, "savefig", keep)
    return found


def made_up(seed: int) -> Values:
    return np.random.default_rng(seed).uniform(0.1, 1, size=(2, 3, len(SETS)))


def places(kind: str) -> list[int]:
    return [index for index, item in enumerate(SETS) if item.kind == kind]


def line(axes: Axes, label: str) -> tuple[Values, Values, str]:
    """x, y and the colour of a curve by its label in the legend."""
    found = next(line for line in axes.get_lines() if line.get_label() == label)
    return np.asarray(found.get_xdata()), np.asarray(found.get_ydata()), to_hex(found.get_color())


def band(axes: Axes, colour: str) -> Values:
    """The corners (N, 2) of the band of a colour."""
    bands = [item for item in axes.collections if isinstance(item, PolyCollection)]
    (own,) = [item for item in bands if to_hex(item.get_facecolor()[0][:3]) == colour]  # type: ignore[index]
    found: Values = own.get_paths()[0].vertices  # type: ignore[assignment]
    return found


def test_each_curve_is_that_of_its_sets_with_its_interval(drawn: list[Figure], tmp_path: Path) -> None:
    sweeps = {name: Sweep.of(SETS, made_up(seed)) for seed, name in enumerate(("pictures", "velocity"))}
    figures.curves(tmp_path / "curves.png", sweeps, {0.25: (2, 0), 0.5: (1, 3)}, 8)
    (figure,) = drawn
    assert len(figure.axes) == 4
    for row, (name, sweep) in enumerate(sweeps.items()):
        left, right = figure.axes[2 * row : 2 * row + 2]
        assert left.get_ylabel() == figures.TITLES[name]
        shown = (
            (left, "front", "first n blocks", [1, 2, 3, 4]),
            (left, "back", "last m blocks", [1, 2, 3, 4]),
            (right, "window", "3 blocks in a row", [1, 2, 3, 4, 5, 6]),
        )
        for axes, kind, label, numbers in shown:
            x, y, colour = line(axes, label)
            assert x.tolist() == numbers
            assert y == pytest.approx(sweep.values.mean((0, 1))[places(kind)])
            corners = band(axes, colour)
            for number, low, high in zip(
                numbers, *np.quantile(sweep.means[:, places(kind)], [0.025, 0.975], axis=0), strict=True
            ):
                ends = corners[corners[:, 0] == number][:, 1]
                assert (ends.min(), ends.max()) == pytest.approx((low, high))
    first = figure.axes[0]
    marks = [item for item in first.get_lines() if item.get_marker() == "o"]
    means = sweeps["pictures"].values.mean((0, 1))
    expected = [
        (places("front")[1], 2, figures.BLUE), (places("front")[0], 1, figures.BLUE),
        (places("back")[2], 3, figures.ORANGE),
    ]  # fmt: skip
    assert [(item.get_xdata()[0], to_hex(item.get_color())) for item in marks] == [  # type: ignore[index]
        (number, colour) for _, number, colour in expected
    ]
    assert [item.get_ydata()[0] for item in marks] == pytest.approx([means[place] for place, _, _ in expected])  # type: ignore[index]
    assert [text.get_text() for text in first.texts] == ["25%", "50%", "50%"]


def panels(figure: Figure) -> dict[str, Values]:
    """The values of each panel by its title."""
    return {axes.get_title(loc="left"): np.asarray(axes.images[0].get_array()) for axes in figure.axes if axes.images}


def test_the_heat_map_shows_each_block_masked_alone_and_its_attention(
    flux: ModelSource, subjects: tuple[str, str], drawn: list[Figure], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a whole selection, whose probe is made up: rows are noise levels and columns blocks, in the forward order."""
    lora = make_lora(flux, tmp_path / "lora", range(8))
    tuned = [Tuned(Subject("red_dog", Path(subjects[0]), "a photo of sks red dog", ("{}",)), lora)]
    generator = np.random.default_rng(0)
    made = Velocities(
        generator.uniform(0.1, 1, size=(1, 2, len(SIGMAS), len(SETS))),
        generator.uniform(0.1, 1, size=(1, 2, len(SIGMAS), 8)), ("sks red dog",),
    )  # fmt: skip
    monkeypatch.setattr("blockskip.selection.job.trained", lambda *_: tuned)
    monkeypatch.setattr("blockskip.selection.job.velocity_distances", lambda *_: made)
    found = select(request(flux.folder, tmp_path, subjects, ratios=(0.5,), window=3, probes=("velocity",)))
    assert len(drawn) == 2
    own = panels(drawn[1])
    assert list(own) == ["change of velocity, that block alone masked", "attention to the subject"]
    changes, attention = own.values()
    assert changes == pytest.approx(made.distances.mean((0, 1))[:, places("block")])
    assert attention == pytest.approx(made.attention.mean((0, 1)))
    for axes in drawn[1].axes[:2]:
        assert [text.get_text() for text in axes.get_yticklabels()] == [f"{sigma:g}" for sigma in SIGMAS]
    y = line(drawn[0].axes[0], "last m blocks")[1]
    assert y == pytest.approx([entry["mean"] for entry in found["distances"]["back"]])
    assert y == pytest.approx(made.distances.mean((0, 1, 2))[places("back")])
