"""Phases that plans share: whatever is changed, a shared plan is one that is counted anew; so is what a fit chooses."""

import functools
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from blockskip.loading.source import ModelSource
from blockskip.planner import make, make_plan, make_setting, reuse
from blockskip.planner.budget import Budget, fit
from blockskip.planner.plan import Plan
from blockskip.settings import from_flat, leaves

BASE: dict[str, Any] = {
    "data.resolution": 32, "data.full_resolution": 64, "lora.rank": 2, "train.steps": 3, "preview.height": 32,
    "preview.width": 32, "preview.num_inference_steps": 2, "preview.prompts": ["a dog"], "skip.ratio": 0.3,
}  # fmt: skip
#: Another value of every setting that a plan may depend on.
CHANGES: dict[str, Any] = {
    "train.optimizer": "adamw8bit", "model.dtype": "float32", "model.quantization": "nf4",
    "model.stream_text_encoders": True, "data.resolution": 64, "data.full_resolution": 128, "data.text_length": 8,
    "skip.ratio": 0.5, "skip.tail_mode": "stream", "skip.front_mode": "keep", "skip.middle": 2, "skip.rule": "none",
    "lora.rank": 4, "lora.targets": ["to_q"], "lora.freeze_a": True, "train.steps": 4, "train.batch_size": 2,
    "train.gradient_accumulation_steps": 1, "train.max_grad_norm": 0.0, "train.gradient_checkpointing": True,
    "train.stream_middle": True, "train.checkpoint_every": 1, "train.checkpoints_total_limit": 1, "features.pool": 1,
    "features.window": "4KiB", "features.window_on": "disk", "features.disk": "4KiB",
    "preview.prompts": ["a dog", "a cat"], "preview.images": 2,
    "preview.num_inference_steps": 3, "preview.guidance_scale": 7.0, "preview.height": 64, "preview.width": 64,
    "preview.batch_size": 2, "preview.stream": True,
}  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    reuse.forget()
    yield
    reuse.forget()


def planned(source: ModelSource, **values: Any) -> Plan:
    given = from_flat(BASE | {name.replace("__", "."): value for name, value in values.items()})
    return make_plan(make_setting(source, given, torch.device("cuda")), remember=False)


def test_every_changed_setting_changes_the_phases_that_depend_on_it(guided: ModelSource) -> None:
    base = planned(guided)
    assert set(CHANGES) <= set(leaves())
    shared = {key: planned(guided, **{key.replace(".", "__"): value}) for key, value in CHANGES.items()}
    for key, value in CHANGES.items():
        reuse.forget()
        fresh = planned(guided, **{key.replace(".", "__"): value})
        assert shared[key] == fresh, key
        assert fresh != base, key


def test_a_second_block_is_counted_where_blocks_visit_and_nowhere_else(guided: ModelSource) -> None:
    visiting = {"train__stream_middle": True, "preview__stream": True}
    base = planned(guided, **visiting)
    shared = planned(guided, **visiting, model__read_ahead=False)
    reuse.forget()
    assert shared == planned(guided, **visiting, model__read_ahead=False)
    changed = {name for name, phase in shared.phases.items() if phase != base.phases[name]}
    assert {"precompute", "train"} <= changed <= {"precompute", "train", "preview", "save"}


def test_nothing_of_a_model_stays_when_it_was_counted(guided: ModelSource) -> None:
    alive = []
    for rank in (2, 3, 4):
        planned(guided, lora__rank=rank)
        reuse.forget()
        gc.collect()
        alive.append(sum(issubclass(type(item), nn.Module) for item in gc.get_objects()))
    assert alive[0] == alive[1] == alive[2]


@pytest.mark.parametrize("family", ["flux", "sana"])
def test_a_fit_with_shared_phases_is_the_fit_without(
    family: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    source: ModelSource = request.getfixturevalue(family)
    config = from_flat(BASE | {"data.resolution": None, "data.full_resolution": 1024})
    counted: list[str] = []

    def plan(anew: bool, wanted: Any) -> Plan:
        if anew:
            reuse.forget()
        return make_plan(make_setting(source, wanted, torch.device("cuda")), remember=False)

    def count(phase: str, setting: Any, counting: Any) -> Any:
        return reuse.shared(phase, setting, lambda: (counted.append(phase), counting())[1])

    monkeypatch.setattr(make, "shared", count)
    start = plan(False, config)
    budget = Budget(device=start.phases["train"].device_peak_bytes * 2 // 3)
    results = []
    numbers = []
    for anew in (False, True):
        reuse.forget()
        counted.clear()
        results.append(fit(config, set(), budget, functools.partial(plan, anew)))
        numbers.append(len(counted))
    assert results[0] == results[1]
    assert results[0].choices
    assert numbers[0] < 0.7 * numbers[1]
