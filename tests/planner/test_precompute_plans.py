"""What a plan says of precompute: the window on disk, and the block that is fetched while another one computes."""

from typing import Any

import pytest
import torch
from torch import nn

from blockskip.features.precompute import Window
from blockskip.loading.source import ModelSource
from blockskip.loading.transformer import empty_transformer
from blockskip.planner import encoding, phases
from blockskip.planner.budget import Budget, as_options, fit
from blockskip.planner.fakes import FakeBlocks
from blockskip.planner.make import make_plan
from blockskip.planner.parts import module_bytes
from blockskip.planner.plan import PhasePlan
from blockskip.planner.previews import denoising
from blockskip.planner.previews import drawn as pictures_of
from blockskip.planner.setting import Setting, make_setting
from blockskip.settings import from_flat

FLAT: dict[str, Any] = {
    "data.resolution": 32, "data.full_resolution": 64, "skip.front": 2, "skip.tail": 2, "train.steps": 8,
    "train.gradient_accumulation_steps": 1,
}  # fmt: skip


def setting_of(source: ModelSource, device: str = "cpu", **values: Any) -> Setting:
    config = from_flat(FLAT | {name.replace("__", "."): value for name, value in values.items()})
    return make_setting(source, config, torch.device(device))


def blocks_of(source: ModelSource) -> list[nn.Module]:
    return source.family.layout.blocks(empty_transformer(source))


def planned(setting: Setting) -> tuple[PhasePlan, int, int, int]:
    """The phase, and bytes of a group, of its state and of its features."""
    text = encoding.encode_text(setting)[1]
    sizes: list[int] = []
    group_bytes = Window.group_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Window, "group_bytes", lambda self, group: sizes.append(group_bytes(self, group)) or sizes[-1])
        plan, features = phases.precompute(setting, text)
    front = sum(value.nbytes for name, value in features.items() if name.startswith("front."))
    return plan, sizes[0], front, sum(value.nbytes for value in features.values())


def test_a_window_on_disk_takes_one_group_s_memory_and_a_window_s_disk(flux: ModelSource) -> None:
    inside, group, state, features = planned(setting_of(flux, "cuda"))
    outside = planned(setting_of(flux, "cuda", features__window_on="disk"))[0]
    assert inside.host["window of states"] == 8 * group
    assert outside.host["window of states"] == group
    assert outside.host["written groups"] == 8 * features
    assert inside.disk_bytes == 8 * features
    assert outside.disk_bytes == 8 * features + 8 * group
    assert outside.read_bytes - inside.read_bytes == 8 * 8 * (group - 2 * state)  # every group in every pass
    assert outside.device_peak_bytes == inside.device_peak_bytes
    small = planned(setting_of(flux, "cuda", features__window=f"{2 * group}B"))[0]
    every_block = 4 * sum(value.numel() for block in blocks_of(flux) for value in block.parameters())
    assert small.read_bytes - inside.read_bytes == 3 * every_block  # four windows, and each reads every block


@pytest.mark.parametrize("front_alone", [1, 2])
def test_a_device_of_its_own_holds_the_next_block_too(flux: ModelSource, front_alone: int) -> None:
    split = {"skip__front": front_alone, "skip__tail": 0, "model__dtype": "float32"}
    one, two = (planned(setting_of(flux, device, **split))[0] for device in ("mps", "cuda"))
    blocks = FakeBlocks(setting_of(flux, **split), phases.LiveBytes())
    largest = max(map(module_bytes, blocks.empty.values()))
    more = two.device["weights"] - one.device["weights"]
    assert more == (0 if front_alone == 1 else largest)  # behind the last block there is none


def test_a_streamed_preview_holds_the_next_block_too(flux: ModelSource) -> None:
    values = {"preview__prompts": ["a dog"], "preview__stream": True, "preview__height": 32, "preview__width": 32}
    settings = [setting_of(flux, device, model__dtype="float32", **values) for device in ("mps", "cuda")]
    encoded = encoding.encode_text(settings[0])[1]
    drawn = [denoising(setting, pictures_of(setting), encoded, {}) for setting in settings]
    blocks = FakeBlocks(settings[0], phases.LiveBytes())
    largest = max(map(module_bytes, blocks.empty.values()))
    assert drawn[1].device["weights"] - drawn[0].device["weights"] == largest


def test_a_budget_takes_the_disk_before_windows_of_a_group_or_two(flux: ModelSource) -> None:
    """But not where the disk is too small for it."""
    config = from_flat(FLAT | {"train.steps": 400})
    device = torch.device("cuda")

    def plan(config: Any) -> Any:
        return make_plan(make_setting(flux, config, device))

    group = planned(setting_of(flux, "cuda"))[1]
    with pytest.MonkeyPatch.context() as patch:
        windows = (f"{64 * group}B", f"{16 * group}B", f"{2 * group}B")
        patch.setattr("blockskip.planner.budget.WINDOWS", windows)
        patch.setattr("blockskip.planner.budget.SMALLEST_BEFORE_DISK", windows[1])
        whole = {window: plan(from_flat(FLAT | {"train.steps": 400, "features.window": window})) for window in windows}
        host = {window: found.phases["precompute"].host_peak_bytes for window, found in whole.items()}
        fixed = ("skip.front", "skip.tail")
        assert as_options(fit(config, fixed, Budget(host=host[windows[1]]), plan)) == {"features.window": windows[1]}
        on_disk = as_options(fit(config, fixed, Budget(host=host[windows[1]] - group), plan))
        assert on_disk == {"features.window": "1GiB", "features.window_on": "disk"}
        small = Budget(host=host[windows[1]] - group, disk=plan(config).disk_bytes)
        assert as_options(fit(config, fixed, small, plan)) == {"features.window": windows[2]}
