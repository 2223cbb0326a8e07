"""Every setting is a run that can begin, and differs from plain LoRA in what its name says and in nothing else."""

from pathlib import Path
from typing import Any

import pytest

from blockskip.benchmark.model import open_for
from blockskip.benchmark.request import Request, quick
from blockskip.benchmark.settings import CORE, QUICK, REFERENCE, SETTINGS, chosen, known_settings
from blockskip.benchmark.subjects import builtin_subject
from blockskip.benchmark.trained import configured, looked_at
from blockskip.errors import UserError
from blockskip.presets import split_for
from blockskip.run import prepare
from blockskip.run.prepare import Prepared
from blockskip.settings import from_flat, to_flat

#: What each setting changes of plain LoRA's resolved settings.
SPLIT = {"skip.front", "skip.tail"}
CHANGED: dict[str, set[str]] = {
    "resize": {"data.resolution"},
    "patches": {"data.resolution", "patches.direction"},
    "front-50": {"skip.front"},
    "tail-50": {"skip.tail"},
    "paper-50": SPLIT,
    "kept-50": {*SPLIT, "skip.front_mode", "skip.tail_mode"},
    "lora-fa": {"lora.freeze_a"},
    "lisa": {"train.lisa_blocks", "train.lisa_period", "train.learning_rate"},
    "hollow-30": {"skip.middle"},
}
for _ratio in ("30", "40", "50"):
    CHANGED[f"skip-{_ratio}"] = {*SPLIT, "skip.ratio"}
    CHANGED[f"skip-{_ratio}-no-residual"] = {*SPLIT, "skip.ratio", "skip.rule"}
    CHANGED[f"blockskip-{_ratio}"] = {*SPLIT, "skip.ratio", "data.resolution", "patches.direction"}
CHANGED |= dict.fromkeys(("patches-random", "patches-high-to-low"), CHANGED["patches"])


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Prepared]:
    """The run of every setting on a built-in subject; nothing is loaded."""
    model, subject = open_for(Request()), builtin_subject("owl")
    folder = tmp_path_factory.mktemp("runs")
    return {
        name: prepare(from_flat({**configured(model, setting, subject, 3), "output": str(folder / name)}))
        for name, setting in known_settings().items()
    }


def test_every_setting_changes_what_it_is_named_for(prepared: dict[str, Prepared]) -> None:
    plain = to_flat(prepared[REFERENCE].config)
    for name, one in prepared.items():
        values: dict[str, Any] = to_flat(one.config)
        changed = {key for key in values if values[key] != plain[key]} - {"output"}
        assert changed - SPLIT - {"skip.ratio"} == CHANGED.get(name, set()) - SPLIT - {"skip.ratio"}, name
        assert changed <= CHANGED.get(name, set()) | SPLIT, name
    assert plain["train.seed"] == 3 and plain["data.resolution"] == plain["data.full_resolution"] == 128


def test_splits_are_the_models_own_or_all_at_one_end(prepared: dict[str, Prepared]) -> None:
    for name, one in prepared.items():
        pair = (one.split.front, one.split.tail)
        if name.startswith(("skip-", "blockskip-", "kept-")):
            ratio = int(name.split("-")[1]) / 100
            own, _ = split_for("flux", (4, 8), ratio)
            assert pair == (own.front, own.tail), name
            assert sum(pair) == round(12 * ratio)
    ends = {name: (prepared[name].split.front, prepared[name].split.tail) for name in ("front-50", "tail-50", "lora")}
    assert ends == {"front-50": (6, 0), "tail-50": (0, 6), "lora": (0, 0)}
    assert sum((prepared["paper-50"].split.front, prepared["paper-50"].split.tail)) == 6
    assert min(prepared["paper-50"].split.front, prepared["paper-50"].split.tail) > 0


def test_all_settings_see_the_same_pictures_noise_levels_and_noise(prepared: dict[str, Prepared]) -> None:
    """So the comparison is paired: at equal size the very same samples, with patches the same but for their boxes."""

    def samples(name: str, *fields: str) -> list[tuple[Any, ...]]:
        groups = prepared[name].schedule.groups
        return [tuple(getattr(sample, field) for field in fields) for group in groups for sample in group.samples]

    same = ("picture", "sigma", "noise_seed", "caption", "flip", "weight")
    for name, one in prepared.items():
        assert samples(name, *same) == samples(REFERENCE, *same), name
        if one.config.data.resolution == 128:
            assert samples(name, "box") == samples(REFERENCE, "box"), name
    boxes = {name: samples(name, "box") for name in ("patches", "patches-random", "patches-high-to-low", "resize")}
    assert len({str(value) for value in boxes.values()}) == 4
    assert samples("patches", "box") == samples("blockskip-50", "box")
    assert len(prepared[REFERENCE].schedule.groups[0].samples) == 4


def test_names_stand_for_settings_and_plain_lora_is_always_among_them() -> None:
    assert [setting.name for setting in chosen(["patches"])] == ["lora", "patches"]
    assert [setting.name for setting in chosen(["core"])] == [name for name in SETTINGS if name in CORE]
    assert [setting.name for setting in chosen(["all"])] == list(known_settings())
    assert len(CORE) == 8 and {"skip-50", "skip-50-no-residual", *QUICK} <= set(CORE)
    with pytest.raises(UserError, match='--settings "skip" is not one of core, all, lora'):
        chosen(["skip"])


def test_quick_takes_two_subjects_three_settings_and_few_steps() -> None:
    found = quick(Request(training={"lora.rank": 4}))
    assert (found.count, found.settings, found.images) == (2, QUICK, 1) and len(QUICK) == 3
    assert found.training == {"lora.rank": 4, "train.steps": 60}
    assert quick(Request(training={"train.steps": 5})).training["train.steps"] == 5


@pytest.mark.parametrize(
    ("steps", "points", "found"), [(200, 3, [50, 100, 150]), (7, 2, [2, 4]), (1, 3, []), (10, 0, []), (3, 5, [1, 2])]
)
def test_a_run_is_looked_at_in_equal_steps_before_its_end(steps: int, points: int, found: list[int]) -> None:
    assert looked_at(steps, points) == found


def test_a_request_goes_through_json(tmp_path: Path) -> None:
    import json

    asked = Request(seeds=(0, 1), encoders=("dino", "clip"), training={"train.steps": 5}, output=str(tmp_path))
    assert Request.from_json(json.loads(json.dumps(asked.as_json()))) == asked
