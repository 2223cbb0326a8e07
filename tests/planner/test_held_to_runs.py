"""Plans are held to real runs: what fake tensors add up to is what real ones take, phase by phase."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from blockskip.features.precompute import Input, precompute
from blockskip.loading.source import ModelSource
from blockskip.loading.weights import Weights
from blockskip.planner import encoding, phases, previews
from blockskip.planner.around import bytes_of
from blockskip.planner.counting import LiveBytes
from blockskip.planner.parts import empty_part, module_bytes
from blockskip.planner.plan import PhasePlan
from blockskip.planner.setting import Setting, make_setting
from blockskip.settings import from_flat
from blockskip.store.groups import GroupStore
from tests.planner import real_runs as real

TOLERANCE = 0.02
BF16 = {"dtype": "bfloat16"}
INT8 = {"dtype": "int8"}
#: Each value of every setting, and every family with and without checkpointing, at least once.
TRAINING: list[tuple[str, dict[str, Any]]] = [
    ("flux", {"skip": (0, 0), "accumulation": 2}),
    ("flux", {"model": BF16 | {"quantization": "int8"}, "gradient_checkpointing": True}),
    ("sana", {"model": {"quantization": "nf4"}}),
    ("flux", {"middle": 3}),
    ("flux", {"skip": (0, 0), "lisa_blocks": 2, "lisa_period": 1, "accumulation": 2}),
    ("sana", {"skip": (0, 0), "lisa_blocks": 1, "lisa_period": 1, "model": BF16, "gradient_checkpointing": True}),
    ("sd3", {"skip": (0, 0), "lisa_blocks": 2, "lisa_period": 2, "model": BF16, "accumulation": 2}),
    ("sana", {"middle": 2, "stream_middle": True, "gradient_checkpointing": True}),
    ("flux", {"skip": (2, 0), "freeze_a": True, "rank": 16, "accumulation": 2}),
    ("sd3", {"freeze_a": True, "rank": 16, "stream_middle": True}),
    ("flux", {"skip": (2, 2), "front_mode": "keep", "tail_mode": "keep"}),
    ("sana", {"skip": (1, 2), "front_mode": "keep", "tail_mode": "keep", "model": {"quantization": "nf4"}}),
    ("sana", {"skip": (1, 2), "tail_mode": "stream", "model": BF16, "gradient_checkpointing": True}),
    ("sd3", {"model": BF16, "batch": 2, "accumulation": 2}),
    ("flux", {"model": BF16, "skip": (2, 2), "features": INT8}),
    ("sd3", {"skip": (1, 2), "stream_middle": True, "gradient_checkpointing": True}),
    ("qwen_image", {"model": BF16 | {"quantization": "nf4"}}),
    ("qwen_image", {"skip": (2, 1), "gradient_checkpointing": True, "stream_middle": True, "tail_mode": "stream"}),
    ("flux", {"batch": 2, "positions": "picture"}),
    ("flux2", {"batch": 2, "positions": "picture", "model": BF16, "gradient_checkpointing": True}),
    ("chroma", {"skip": (2, 1), "positions": "picture"}),
    ("longcat_image", {"batch": 2, "positions": "picture", "gradient_checkpointing": True}),
    ("ovis_image", {"skip": (2, 1), "positions": "picture", "model": BF16}),
    ("bria", {"skip": (2, 2), "model": BF16, "gradient_checkpointing": True}),
    ("hidream", {"skip": (0, 0)}),
    ("hidream", {"batch": 2, "model": BF16 | {"quantization": "int8"}, "gradient_checkpointing": True}),
    ("hidream", {"skip": (2, 2), "tail_mode": "stream", "stream_middle": True, "model": BF16}),
    ("pixart_sigma", {"skip": (0, 0), "accumulation": 2}),
    ("pixart_sigma", {"model": BF16 | {"quantization": "nf4"}, "gradient_checkpointing": True}),
    ("pixart_alpha", {"model": BF16, "batch": 2}),
    ("pixart_told", {"skip": (1, 0), "gradient_checkpointing": True}),
    ("lumina2", {"skip": (2, 1), "model": BF16}),
    ("lumina2", {"skip": (0, 0), "model": {"quantization": "int8"}, "gradient_checkpointing": True, "accumulation": 2}),
    ("cogview4", {"skip": (0, 0), "accumulation": 2, "model": BF16}),
    ("cogview4", {"model": {"quantization": "nf4"}, "gradient_checkpointing": True}),
    ("z_image", {"model": {"quantization": "int8"}, "accumulation": 2}),
    ("z_image", {"skip": (0, 0), "model": BF16, "gradient_checkpointing": True}),
    ("aura_flow", {"skip": (2, 1), "model": BF16 | {"quantization": "nf4"}}),
    ("aura_flow", {"skip": (0, 0), "gradient_checkpointing": True, "accumulation": 2}),
    ("chroma", {"skip": (0, 0), "model": BF16, "accumulation": 2}),
    ("chroma", {"skip": (2, 1), "model": {"quantization": "int8"}, "gradient_checkpointing": True}),
    ("flux2", {"skip": (0, 0), "accumulation": 2}),
    ("flux2", {"skip": (2, 1), "model": BF16 | {"quantization": "nf4"}, "gradient_checkpointing": True}),
    ("flux2_klein", {"model": BF16, "batch": 2}),
    ("longcat_image", {"skip": (0, 0), "model": BF16 | {"quantization": "nf4"}, "accumulation": 2}),
    ("ovis_image", {"skip": (0, 0), "model": {"quantization": "int8"}, "gradient_checkpointing": True}),
    ("bria", {"skip": (0, 0), "accumulation": 2}),
]


def masks(setting: Setting, prompts: int) -> int:
    """Bytes of what language models mask later tokens with: a real run has none where nothing is padded."""
    classes = [setting.source.part_class(part) for _, part in setting.source.text_parts]
    tokens = max(setting.source.family.token_counts(setting.text_length).values())
    return prompts * tokens**2 if any(cls.can_generate() for cls in classes) else 0


def close(plan: PhasePlan, live: LiveBytes, spared: int = 0) -> None:
    """Hold the device's peak, and how it is divided, to what was counted; but for bytes that a real run is spared."""
    allowed = TOLERANCE * live.device_peak + spared
    assert abs(plan.device_peak_bytes - live.device_peak) <= allowed, (plan.device, live.device_split)
    for role, size in live.device_split.items():
        assert abs(plan.device[role] - size) <= allowed, (role, plan.device, live.device_split)


def stored(setting: Setting, text: dict[str, torch.Tensor], folder: Path) -> dict[str, torch.Tensor]:
    """The features of one group by a real precompute."""
    store, key = GroupStore(folder), "ab"
    precompute(
        setting.source, setting.stored, setting.rule, [key], lambda _: Input(key, *real.drawn(setting, text)), store,
        window_bytes=2**20, dtype=setting.dtype, device=real.CPU, guidance=setting.guidance,
        int8=setting.config.features.dtype == "int8",
    )  # fmt: skip
    return store.read(key)


@pytest.mark.parametrize(("family", "settings"), TRAINING)
def test_training(family: str, settings: dict[str, Any], request: pytest.FixtureRequest, tmp_path: Path) -> None:
    setting = real.setting_of(request.getfixturevalue(family), **settings)
    text = encoding.encode_text(setting)[1]
    features = phases.precompute(setting, text)[1]
    trained = phases.train(setting, text, features)
    plan, live = trained.plan, real.train(setting, real.shaped_like(text), features, tmp_path, trained.step)
    close(plan, live)
    steps = setting.config.train.steps
    assert plan.flops == pytest.approx(steps * live.flops, rel=1e-3)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"batch": 2, "model": BF16, "skip": (2, 0)},
        {"middle": 2, "middle_start": 1},
        {"model": BF16, "skip": (2, 1), "features": INT8},
    ],
    ids=["float32", "bfloat16", "inside", "int8"],
)
def test_encoding_and_precompute(source: ModelSource, settings: dict[str, Any], tmp_path: Path) -> None:
    setting = real.setting_of(source, **settings)
    plan, text = encoding.encode_text(setting)
    found = real.text_of(setting)
    assert {name: (value.shape, value.dtype) for name, value in found.items()} == {
        name: (value.shape, value.dtype) for name, value in text.items()
    }
    close(plan, real.text_encoded(setting), masks(setting, 1))
    close(encoding.encode_pictures(setting), real.pictures_encoded(setting))
    plan, _ = phases.precompute(setting, text)
    live = real.precomputed(setting, found)
    close(plan, live)
    assert plan.flops == pytest.approx(setting.groups * live.flops, rel=1e-3)
    kept = stored(setting, found, tmp_path)
    assert plan.disk_bytes == setting.groups * sum(value.nbytes for value in kept.values())


@pytest.mark.parametrize("settings", [{}, {"batch": 2, "model": BF16}], ids=str)
@pytest.mark.parametrize("family", ["flux", "flux2", "hidream"])
def test_precompute_of_patches_in_their_places(
    family: str, settings: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    setting = real.setting_of(request.getfixturevalue(family), positions="picture", **settings)
    text = encoding.encode_text(setting)[1]
    plan, live = phases.precompute(setting, text)[0], real.precomputed(setting, real.text_of(setting))
    close(plan, live)
    assert plan.flops == pytest.approx(setting.groups * live.flops, rel=1e-3)


def test_int8_features_take_about_half_of_the_disk_and_of_what_is_read_ahead(flux: ModelSource) -> None:
    """Of a run in bfloat16: a byte a value and four a token of 16 values."""
    found = {}
    for dtype in ("auto", "int8"):
        setting = real.setting_of(flux, skip=(2, 2), model=BF16, features={"dtype": dtype})
        text = encoding.encode_text(setting)[1]
        plan, features = phases.precompute(setting, text)
        found[dtype] = plan, phases.train(setting, text, features).plan, features
    (exact, exact_train, features), (small, small_train, _) = found["auto"], found["int8"]
    values = sum(value.numel() for value in features.values())
    tokens = sum(value.shape[0] * value.shape[1] for value in features.values())
    assert exact.disk_bytes == setting.groups * 2 * values
    assert small.disk_bytes == setting.groups * (values + 4 * tokens)
    saved = 3 * (2 * values - values - 4 * tokens)
    assert exact_train.host["read ahead"] - small_train.host["read ahead"] == saved
    assert exact_train.read_bytes - small_train.read_bytes == saved  # of three steps


def test_streamed_text_encoders_hold_several_prompts(source: ModelSource) -> None:
    setting = real.setting_of(source, model={"stream_text_encoders": True})
    close(
        encoding.encode_text(setting)[0], real.text_encoded(setting, setting.captions), masks(setting, setting.captions)
    )


def test_a_frozen_a_takes_no_gradient_and_no_state_and_is_saved(sana: ModelSource) -> None:
    found = []
    for freeze in (False, True):
        setting = real.setting_of(sana, skip=(0, 0), rank=16, accumulation=2, freeze_a=freeze)
        found.append(phases.train(setting, encoding.encode_text(setting)[1], {}))
    whole, half = found
    assert half.adapter == whole.adapter == whole.plan.device["adapters"] == half.plan.device["adapters"]
    assert half.plan.device["gradients"] < 0.6 * whole.plan.device["gradients"]
    assert half.optimizer < 0.6 * whole.optimizer
    assert half.plan.device["weights"] == whole.plan.device["weights"]
    assert half.plan.device["activations"] < whole.plan.device["activations"]


def test_streamed_blocks_are_read_at_their_own_sizes(
    flux: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Double blocks are skipped, and larger than the single ones that are streamed; one of these is read at a time."""
    setting = real.setting_of(flux, skip=(3, 0), stream_middle=True)
    text = encoding.encode_text(setting)[1]
    features = phases.precompute(setting, text)[1]
    plan, inside, read = phases.train(setting, text, features).plan, Weights.inside, list[int]()

    def counted(*args: Any) -> dict[str, torch.Tensor]:
        found = inside(*args)
        read.append(sum(value.nbytes for value in found.values()))
        return found

    monkeypatch.setattr(Weights, "inside", counted)
    real.train(setting, real.shaped_like(text), features, tmp_path)  # two steps
    stored = bytes_of(features) + bytes_of({"latents": real.drawn(setting, real.shaped_like(text))[0]})
    assert len(read) == 4 * len(setting.streamed) and plan.read_bytes == 3 * (sum(read) // 2 + stored)
    setting = dataclasses.replace(setting, device=torch.device("cuda"))
    assert phases.train(setting, text, features).plan.host["weights file"] == max(read)


def test_on_cuda_a_second_block_is_read_ahead(flux: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever visits takes one block more where the next one is copied beside the computation, unless told not to."""
    values = {"train.stream_middle": True, "model.dtype": "float32", "skip.front": 2, "skip.tail": 1}
    values |= {"preview.stream": True, "preview.prompts": ["a"], "preview.height": 64, "preview.width": 64}
    peaks, denoising, drawn = {}, previews.denoising, list[PhasePlan]()
    monkeypatch.setattr(previews, "denoising", lambda *given: drawn.append(denoising(*given)) or drawn[-1])
    for device, ahead in (("cpu", True), ("cpu", False), ("cuda", True), ("cuda", False)):
        setting = make_setting(flux, from_flat(values | {"model.read_ahead": ahead}), torch.device(device))
        _, text = encoding.encode_text(setting)
        before, features = phases.precompute(setting, text)
        previews.preview(setting, *encoding.text_encoders(setting))
        peaks[device, ahead] = {
            "precompute": before.device["weights"], "preview": drawn[-1].device["weights"],
            "train": phases.train(setting, text, features).plan.device["weights"],
        }  # fmt: skip
    sizes = [module_bytes(one) for one in flux.family.layout.blocks(empty_part(flux, "transformer", torch.float32))]
    second = {"precompute": max(sizes), "preview": max(sizes), "train": max(sizes[2:-1])}
    assert peaks["cpu", True] == peaks["cpu", False] == peaks["cuda", False]
    assert {phase: peaks["cuda", True][phase] - value for phase, value in peaks["cpu", True].items()} == second
