"""The speed benchmark on tiny models: what it gives, and that its bounds follow from what is skipped."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import random_models, speed
from benchmarks.speed_table import AIMS, HEADINGS, aims, markdown_tables
from blockskip.config import TrainConfig

TINY = {
    "flux-like": {"num_layers": 1, "num_single_layers": 3, "attention_head_dim": 16, "num_attention_heads": 2,
                  "joint_attention_dim": 24, "pooled_projection_dim": 20, "axes_dims_rope": (4, 6, 6)},
    "sana-like": {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 4, "num_cross_attention_heads": 2,
                  "cross_attention_head_dim": 16, "cross_attention_dim": 32, "caption_channels": 24},
}  # fmt: skip


@pytest.fixture(scope="module")
def document(
    tmp_path_factory: pytest.TempPathFactory, flux_folder: Path, sana_folder: Path
) -> dict[str, list[speed.Figures]]:
    """The figures of both tiny pipelines, by family."""
    output = tmp_path_factory.mktemp("speed") / "speed.json"
    names = [_at_64_pixels(folder, output.parent / folder.name) for folder in (flux_folder, sana_folder)]
    given = speed.main(["--quick", "--markdown", "--json", str(output), "--models", *names])
    assert json.loads(output.read_text(encoding="utf-8")) == given
    assert list(given["models"]) == names
    return {
        family: [speed.Figures(**one) for one in given["models"][name]]
        for family, name in zip(("flux", "sana"), names, strict=True)
    }


def _at_64_pixels(model: Path, folder: Path) -> str:
    """A copy of a tiny pipeline that says that it was made for 64 pixels and short prompts."""
    shutil.copytree(model, folder)
    settings = {"full_resolution": 64, "call": {"max_sequence_length": 12}}
    (folder / "builtin.json").write_text(json.dumps(settings), encoding="utf-8")
    return str(folder)


@pytest.fixture(params=["flux", "sana"])
def figures(request: pytest.FixtureRequest, document: dict[str, list[speed.Figures]]) -> list[speed.Figures]:
    return document[request.param]


def test_every_way_is_measured(figures: list[speed.Figures]) -> None:
    assert [one.way for one in figures] == [way.name for way in speed.WAYS]
    for one, way in zip(figures, speed.WAYS, strict=True):
        assert min(one.micro_step, one.update, one.micro_step_flops) > 0
        assert 0 <= one.waiting_share < 1
        assert (one.precompute != 0, one.precompute_flops > 0, one.window_samples > 0) == (way.ratio > 0,) * 3


def test_bounds_fall_with_what_is_left_to_compute(figures: list[speed.Figures]) -> None:
    plain, low, third, half = figures
    assert plain.bound == 1
    assert plain.bound > low.bound > half.bound - half.precompute_flops / plain.micro_step_flops
    assert half.bound < third.bound < 1
    assert third.precompute_flops == half.precompute_flops  # both go through every block once
    assert third.micro_step_flops > half.micro_step_flops
    for one in (third, half):
        assert one.pool_bound < one.bound
        assert one.bound * plain.micro_step_flops == pytest.approx(one.precompute_flops + one.micro_step_flops)


def test_totals_are_made_of_what_was_measured() -> None:
    plain = speed.Figures("plain", micro_step=3.0, update=1.0, micro_step_flops=100)
    half = speed.Figures(
        "50%", micro_step=0.75, waiting=0.25, update=1.0, precompute=0.5, window=7.0, window_samples=11,
        micro_step_flops=20, precompute_flops=10,
    )  # fmt: skip
    speed.complete([plain, half], TrainConfig(steps=10, gradient_accumulation_steps=4))
    assert (plain.total, plain.pool_total) == (130.0, 130.0)
    assert half.total == 40 * 1.0 + 10 + 40 * 0.5 + 4 * 7
    assert half.pool_total == 40 * 1.0 + 10 + 10 * 0.5 + 1 * 7
    assert (half.bound, half.pool_bound) == (0.3, 0.225)


def test_aims_stand_beside_the_last_row() -> None:
    plain = speed.Figures("plain", total=100.0, pool_total=100.0)
    good = speed.Figures("50%", total=30.0, pool_total=20.0, bound=0.29, pool_bound=0.19, waiting_share=0.01)
    assert [line.endswith("met") for line in aims([plain, good])] == [True] * len(AIMS)
    bad = speed.Figures("50%", total=60.0, pool_total=40.0, bound=0.29, pool_bound=0.19, waiting_share=0.1)
    assert [line.endswith("missed") for line in aims([plain, bad])] == [True] * len(AIMS)
    lines = markdown_tables({"a": [plain, good]}).splitlines()
    assert {line.count("|") for line in lines} == {len(HEADINGS) + 2}


@pytest.mark.parametrize("name", sorted(TINY))
def test_a_random_model_is_measured_like_any_other(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, arguments, vae, resolution = random_models.MODELS[name]
    monkeypatch.setitem(random_models.MODELS, name, (made, arguments | TINY[name], vae, resolution // 2))
    source = random_models.write_model(name, tmp_path / "model")
    figures = speed.measure(source, speed.plan_for(name, True, None), tmp_path)
    assert figures[3].bound < figures[2].bound < 1
    assert asdict(figures[3])["total"] > 0
