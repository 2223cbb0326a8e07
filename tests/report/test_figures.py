"""The drawings: well-formed, coloured by the page, and with the right values in them."""

from __future__ import annotations

import re
import warnings
import xml.etree.ElementTree as ElementTree

import matplotlib as mpl
import numpy as np
import pytest

from blockskip.report import figures
from blockskip.report.content import Column, Report
from tests.report.examples import EXAMPLES, bare, blockskip, full, losses

KINDS = (figures.losses, figures.memory, figures.device_memory, figures.seconds, figures.fidelity)


def words(svg: str) -> list[str]:
    return [element.text for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("text")]


@pytest.fixture(scope="module")
def drawn() -> dict[str, str]:
    return {kind.__name__: kind(EXAMPLES["device"]()) for kind in KINDS}


def test_every_drawing_is_well_formed_and_takes_its_colours_from_the_page(drawn):
    identifiers: list[str] = []
    for svg in drawn.values():
        ElementTree.fromstring(svg)
        assert "<style" not in svg
        assert not re.search(r"#(?!0{6})[0-9a-f]{6}\b", re.sub(r"url\(#[^)]*\)|href=\"[^\"]*\"|id=\"[^\"]*\"", "", svg))
        assert "var(--series-1)" in svg and "var(--series-2)" in svg and "http://www.w3.org/1999/02" not in svg
        found = set(re.findall(r'id="([^"]+)"', svg))
        assert set(re.findall(r'(?:url\(#|href="#)([^)"]+)', svg)) <= found
        identifiers += found
    assert len(identifiers) == len(set(identifiers))  # several drawings share one page


def test_bars_are_labelled_with_their_values(drawn):
    assert words(drawn["memory"]) == [
        "encode",
        "precompute",
        "train",
        "preview",
        "201 MiB",
        "200 MiB",
        "131 MiB",
        "433 MiB",
        "190 MiB",
        "322 MiB",
        "321 MiB",
    ]
    assert "44.0 GiB" in words(drawn["device_memory"])
    assert {"7 min 11 s", "2 min 32 s"} <= set(words(drawn["seconds"]))
    assert words(drawn["fidelity"]) == ["0.412  (0%)", "0.721  (79%)", "0.709  (76%)", "base 0.412", "real 0.801"]
    assert {"optimiser step", "loss (mean squared error)"} <= set(words(drawn["losses"]))


def test_the_length_of_a_bar_is_its_value():
    svg = figures.seconds(full())
    lengths = []
    for path in re.findall(r'<path d="M ([^"]+)" clip-path[^>]*style="fill: var\(--series-\d\)"', svg):
        xs = [float(x) for x in re.findall(r"(-?[\d.]+) -?[\d.]+", path)]
        lengths.append(max(xs) - min(xs))
    train = sorted(lengths)[-2:]
    assert train[1] / train[0] == pytest.approx(431 / 152, rel=0.01)


def test_what_is_missing_is_not_drawn():
    nothing = Report("", "", [], [], [Column("Base model", losses=[(1, float("nan")), (2, 0.5)])])
    assert [kind(nothing) for kind in KINDS] == [None] * len(KINDS)
    assert figures.fidelity(bare()) is None and figures.device_memory(full()) is None


def test_strange_losses_do_not_break_the_curve():
    values = [(1, float("nan")), (2, 0.4), (3, float("inf")), (4, 0.4), (5, 0.4)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert figures.losses(Report("", "", [], [], [Column("x", losses=values)])) is not None


def test_a_long_run_stays_small():
    report = Report("", "", [], [], [Column("x", losses=losses(0, 0.3, 40_000))])
    assert len(figures.losses(report)) < 150_000


def test_smooth_keeps_a_line_and_the_mean_of_noise():
    assert np.allclose(figures.smooth(np.full(50, 3.0)), 3)
    noise = np.random.default_rng(0).normal(size=2400)
    smoothed = figures.smooth(noise)
    assert smoothed.shape == noise.shape and smoothed.std() < 0.1
    assert smoothed[1200] == pytest.approx(noise[1100:1301].mean())
    assert np.array_equal(figures.smooth(noise[:5]), noise[:5])


def test_the_strip_shows_every_block_once():
    rects = ElementTree.fromstring(figures.blocks(blockskip(), 2))
    filled = ["series-2" in rect.attrib["fill"] for rect in rects]
    assert filled == [False] * 3 + [True] * 6 + [False] * 3


def test_nothing_global_is_left_behind():
    before = dict(mpl.rcParams)
    first = figures.losses(full())
    assert dict(mpl.rcParams) == before
    assert figures.losses(full()) == first  # and the same report gives the same bytes
    from matplotlib import pyplot

    assert pyplot.get_fignums() == []
