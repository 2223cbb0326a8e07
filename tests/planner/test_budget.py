"""Fitting to a budget: the order of the changes, what stays as the user set it, what is taken back, what is refused."""

import dataclasses
import functools
from pathlib import Path

import pytest
import torch

from blockskip.config import Config
from blockskip.errors import UserError
from blockskip.planner.budget import FIRST_RATIO, Budget, _ladder, as_options, describe, fit, refused
from blockskip.planner.fitting import config_of, given_keys
from blockskip.planner.plan import PHASES, PhasePlan, Plan
from blockskip.planner.request import make_request
from blockskip.settings import from_flat, to_flat

WITH_PREVIEW = {"preview.prompts": ["a dog"], "data.resolution": 512, "data.full_resolution": 1024}


def plan(config: Config) -> Plan:
    """A model of 100 bytes in 10 blocks, with rules of thumb in the place of kernels."""
    flat = to_flat(config)
    length, resolution = flat["data.text_length"] or 512, flat["data.resolution"] or 512
    kept = 100 * (1 - flat["skip.ratio"]) * {"none": 1.0, "int8": 0.5, "nf4": 0.28}[flat["model.quantization"]]
    kept = 10 if flat["train.stream_middle"] else kept
    active = (length + resolution) / 16 * (0.25 if flat["train.gradient_checkpointing"] else 1)
    if flat["model.quantization"] != "none" and (flat["train.stream_middle"] or flat["lora.rank"] == 7):
        raise UserError("It cannot be had.")
    window = 1024 if flat["features.window"] == "1GiB" else int(flat["features.window"].removesuffix("MiB"))
    store = length + resolution
    if flat["features.disk"]:
        store = min(store, int(flat["features.disk"].removesuffix("B")))
    decoding = (flat["preview.height"] or 1024) / 16
    whole = 10 if flat["preview.stream"] else 100
    device = {
        "encode text": 10 if flat["model.stream_text_encoders"] else 80, "encode pictures": resolution / 64,
        "precompute": 12, "train": kept + active, "preview": max(decoding, whole), "save": kept,
    }  # fmt: skip
    phases = {
        name: PhasePlan(
            int(device[name]), host_peak_bytes=window if name == "precompute" else 1,
            disk_bytes=store if name == "precompute" else 0, used=name != "preview" or bool(flat["preview.prompts"]),
        )
        for name in PHASES
    }  # fmt: skip
    settings = flat | {"data.text_length": length, "data.resolution": resolution, "data.full_resolution": 1024}
    return Plan("model", "cuda", "bfloat16", (0, 0), 10, settings, phases)


def fitted(budget: Budget, longest_caption: int = 20, **values: object):  # type: ignore[no-untyped-def]
    given = {name.replace("__", "."): value for name, value in values.items()}
    return fit(from_flat(given), given.keys(), budget, plan, longest_caption)


def test_what_fits_is_left_alone_but_for_the_mildest_ratio() -> None:
    found = fitted(Budget(device=1000))
    assert found.choices == ()
    assert found.config.skip.ratio == FIRST_RATIO
    assert fitted(Budget(host=5000)).config == Config()


def test_changes_come_in_their_order_and_only_as_far_as_needed() -> None:
    needs = [fitted(Budget(device=size)) for size in range(140, 10, -1)]
    chosen = [as_options(found) for found in needs if not found.misses]
    first = {key: next(i for i, options in enumerate(chosen) if key in options) for key in chosen[-1]}
    quantized = [options.get("model.quantization", "none") for options in chosen]
    assert first["train.gradient_checkpointing"] < quantized.index("int8") < quantized.index("nf4")
    assert all(not found.misses for found in needs[:100])
    assert needs[-1].misses
    for found in needs:
        if not found.misses:
            assert plan(found.config).device_peak_bytes == found.plan.device_peak_bytes


def test_only_what_makes_a_phase_over_the_budget_smaller_is_changed() -> None:
    assert as_options(fitted(Budget(device=79), skip__ratio=0.9, data__text_length=64, data__resolution=64)) == {
        "model.stream_text_encoders": True
    }
    assert as_options(fitted(Budget(host=300))) == {"features.window": "256MiB"}
    assert set(as_options(fitted(Budget(disk=900)))) == {"features.disk"}


def test_a_preview_is_streamed_and_made_smaller_before_anything_else_is_given_up() -> None:
    values = {name.replace(".", "__"): value for name, value in WITH_PREVIEW.items()}
    assert as_options(fitted(Budget(device=99), skip__ratio=0.9, **values)) == {"preview.stream": True}
    found = fitted(Budget(device=50), skip__ratio=0.9, train__gradient_checkpointing=True, **values)
    assert found.misses == ()
    assert as_options(found)["preview.height"] == 512
    assert found.config.preview.width == 512


def test_what_the_user_set_stays() -> None:
    for key, value in (
        ("train.gradient_checkpointing", False), ("model.quantization", "none"), ("skip.ratio", 0.1),
        ("data.text_length", 512), ("data.resolution", 512), ("train.stream_middle", False),
    ):  # fmt: skip
        found = fitted(Budget(device=1), **{key.replace(".", "__"): value})
        assert to_flat(found.config)[key] == value
        assert key in found.in_the_way
        assert key in refused(found, Budget(device=1))[-1]


def test_what_a_later_change_made_needless_is_taken_back() -> None:
    found = fitted(Budget(device=100), skip__ratio=0.0)
    assert as_options(found) == {"train.gradient_checkpointing": True, "model.quantization": "int8"}
    assert found.plan.device_peak_bytes == plan(found.config).device_peak_bytes <= 100


def test_a_change_that_helps_nothing_is_not_made() -> None:
    values = {"preview__prompts": ["a dog"], "preview__height": 4096, "preview__width": 4096}
    found = fitted(Budget(device=200), **values)
    assert as_options(found) == {}
    assert found.misses == ("preview takes 256 B of device memory of 200 B",)
    assert found.in_the_way == ("preview.height", "preview.width")


@pytest.mark.parametrize(
    ("given", "blamed"),
    [
        ({"skip.front": 2, "skip.tail": 1}, ("skip.front", "skip.tail")),
        ({"skip.middle": 2, "skip.ratio": 0.5}, ("skip.middle",)),
        ({"skip.ratio": 0.0, "train.lisa_blocks": 1}, ("train.lisa_blocks",)),
        ({"train.lisa_blocks": 1, "data.text_length": 512}, ("data.text_length", "train.lisa_blocks")),
    ],
)
def test_what_leaves_a_setting_no_choice_is_in_the_way_and_not_the_setting(
    given: dict[str, int], blamed: tuple[str, ...]
) -> None:
    found = fitted(Budget(device=1), **given)
    assert not ("train.lisa_blocks" in given and found.config.train.stream_middle)
    assert found.config.skip.ratio == given.get("skip.ratio", Config().skip.ratio)
    assert found.in_the_way == blamed
    assert f"These settings of yours were left as they are and stand in the way: {', '.join(blamed)}." in refused(
        found, Budget(device=1)
    )


def test_a_refusal_says_whose_the_settings_are_that_stand_in_the_way() -> None:
    found = fitted(Budget(device=1), skip__front=2, data__text_length=512, data__resolution=512, skip__tail=1)
    origins = {"data.text_length": "of a preset", "skip.tail": 'in "run.toml"', "output": "of nobody"}
    assert refused(found, Budget(device=1), origins)[-3:] == [
        "These settings of a preset were left as they are and stand in the way: data.text_length.",
        "These settings of yours were left as they are and stand in the way: data.resolution, skip.front.",
        'These settings in "run.toml" were left as they are and stand in the way: skip.tail.',
    ]


def test_captions_hold_the_text_length() -> None:
    assert fitted(Budget(device=1), longest_caption=300).config.data.text_length is None
    assert fitted(Budget(device=1), longest_caption=200).config.data.text_length == 256


def test_reasons_and_refusals_name_figures() -> None:
    found = fitted(Budget(device=70))
    assert (
        describe(found)[0]
        == "model.stream_text_encoders = True: before it encode text takes 80 B of device memory of 70 B."
    )
    refusal = refused(fitted(Budget(device=3)), Budget(device=3))
    assert "the smallest plan takes" in refusal[0]


def test_what_cannot_be_planned_is_skipped_and_told() -> None:
    """A library that is not installed, for example."""
    found = fitted(Budget(device=25), lora__rank=7)
    assert found.misses == () and found.config.train.stream_middle and found.untried == ("It cannot be had.",)
    assert describe(found)[-1] == "Not tried: It cannot be had.", "or a slower way would be taken without a word"
    refusal = refused(fitted(Budget(device=1), lora__rank=7), Budget(device=1))
    assert "Not tried: It cannot be had." in refusal


def test_settings_of_the_user_that_a_change_would_make_too_are_not_in_the_way() -> None:
    """Streaming needs the unquantised base, and nobody quantises what is streamed."""
    found = fitted(Budget(device=25), model__quantization="none")
    assert found.misses == () and found.config.train.stream_middle
    found = fitted(Budget(device=25), train__stream_middle=True)
    assert found.misses == found.untried == () and found.config.model.quantization == "none"
    found = fitted(Budget(device=1), train__gradient_checkpointing=True)
    assert "train.gradient_checkpointing" not in found.in_the_way


def test_the_ratio_that_a_budget_begins_with_is_told() -> None:
    said = "skip.ratio = 0.3: a budget begins with the mildest of the paper's ratios."
    assert describe(fitted(Budget(device=1000))) == [said]
    assert said not in describe(fitted(Budget(device=1000), skip__ratio=0.3))
    assert describe(fitted(Budget(host=5000))) == []


def test_half_a_resolution_is_one_that_every_model_takes() -> None:
    halved = plan(from_flat({"data.resolution": 1040}))
    assert {step.values["data.resolution"] for step in _ladder(halved, 128) if "data.resolution" in step.values} == {
        512
    }


def second_block(config: Config, phase: str) -> Plan:
    """``plan`` with 9 bytes for a second block in a phase where blocks visit."""
    own = plan(config)
    visits = {"precompute": True, "preview": config.preview.stream, "train": config.train.stream_middle}[phase]
    one = own.phases[phase]
    more = dataclasses.replace(one, device_peak_bytes=one.device_peak_bytes + 9 * (config.model.read_ahead and visits))
    return dataclasses.replace(own, phases=own.phases | {phase: more})


@pytest.mark.parametrize("phase", ["precompute", "preview", "train"])
def test_reading_ahead_ends_where_a_second_block_does_not_fit(phase: str) -> None:
    values = {"data.text_length": 64, "data.resolution": 256, "preview.prompts": ["a"], "preview.height": 256}
    values |= {"model.quantization": "none", "skip.ratio": 0.5}
    config, counted = from_flat(values), functools.partial(second_block, phase=phase)
    found = {size: fit(config, {*values}, Budget(device=size), counted, 20) for size in range(20, 130)}
    fits = {size: as_options(one) for size, one in found.items() if not one.misses}
    without = {size for size, options in fits.items() if options.get("model.read_ahead") is False}
    smallest = min(fits)
    assert smallest in without
    assert without <= set(range(smallest, smallest + 9))
    held = fit(config, {*values, "model.read_ahead"}, Budget(device=smallest), counted, 20)
    assert held.misses
    assert "model.read_ahead" in held.in_the_way


def test_reading_ahead_goes_on_where_a_later_change_made_room() -> None:
    values = {"data.text_length": 64, "data.resolution": 256, "preview.prompts": ["a"]}
    counted = functools.partial(second_block, phase="preview")
    found = fit(from_flat(values), {*values}, Budget(device=45), counted, 20)
    assert not found.misses
    assert found.config.preview.height == 512
    assert found.config.model.read_ahead
    assert "model.read_ahead" not in as_options(found)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("blockskip.planner.budget._undone", lambda config, _start, _budget, _plan, *same: (config, *same))
        assert (
            as_options(fit(from_flat(values), {*values}, Budget(device=45), counted, 20))["model.read_ahead"] is False
        )


def test_a_run_on_a_cpu_counts_all_memory_as_one(flux_folder: Path) -> None:
    values = {"model.path": str(flux_folder), "memory.device": "1GiB", "train.steps": 2}
    _, chosen = config_of(values, torch.device("cpu"))
    assert chosen == []
    held = {
        "features.window": "64MiB", "train.gradient_checkpointing": False, "model.stream_text_encoders": False,
        "model.quantization": "none", "skip.ratio": 0.5, "data.text_length": 32, "data.resolution": 64,
        "train.stream_middle": False,
    }  # fmt: skip
    own = make_request(from_flat(values | held | {"train.device": "cpu", "memory.device": None})).plan()
    between = (own.device_peak_bytes + own.host_peak_bytes) // 2
    assert own.device_peak_bytes < between < own.host_peak_bytes
    with pytest.raises(UserError, match=r"of host memory of"):
        config_of(values | held | {"memory.device": f"{between}B"}, torch.device("cpu"))


def test_without_a_budget_nothing_is_planned(flux_folder: Path) -> None:
    config, chosen = config_of({"model.path": str(flux_folder)}, torch.device("cpu"))
    assert (config, chosen) == (from_flat({"model.path": str(flux_folder)}), [])


def test_a_whole_config_sets_what_differs_from_the_defaults() -> None:
    config = dataclasses.replace(Config(), output="out")
    assert given_keys(config) == {"output": "out"}
