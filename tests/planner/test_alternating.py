"""Plans of runs that precompute and train in turn, held to real runs: what is read, what waits, what is stored."""

import dataclasses
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from blockskip.features.precompute import Window
from blockskip.loading.source import ModelSource
from blockskip.loading.weights import Weights
from blockskip.measure import Meter
from blockskip.planner import alternating, encoding, phases
from blockskip.planner.around import bytes_of
from blockskip.planner.make import make_plan
from blockskip.planner.setting import make_setting
from blockskip.run import prepare, run
from blockskip.run.planned import setting_of
from blockskip.settings import from_flat
from blockskip.store.groups import GroupStore

#: Of 8 groups, two a step.
RUN: dict[str, Any] = {
    "data.prompt": "a dog", "data.resolution": 32, "data.full_resolution": 64, "lora.rank": 2, "train.steps": 4,
    "train.gradient_accumulation_steps": 2, "train.device": "cpu", "skip.front": 2, "skip.tail": 1,
    "features.keep": True,
}  # fmt: skip
PREVIEW = {
    "preview.prompts": ["a dog"], "preview.every": 3, "preview.num_inference_steps": 1, "preview.height": 32,
    "preview.width": 32,
}  # fmt: skip
#: Settings; how many groups the store may hold, and a window in memory; how many each window really has.
RUNS: dict[str, tuple[dict[str, Any], float | None, float | None, list[int]]] = {
    "unlimited": ({}, None, None, [8]),
    "windows": ({}, None, 3.5, [3, 3, 2]),
    "alternating": ({}, 4.5, None, [2, 4, 2]),
    "alternating, in windows": ({}, 4.5, 1.5, [1] * 8),
    "less than a step": ({"skip.tail": 0}, 0.5, None, [2, 2, 2, 2]),
    "a pool": ({"features.pool": 3}, 2.5, None, [2, 1, 1, 1]),
    "previews": (PREVIEW, 100.0, None, [2, 4, 2]),
    "previews, unlimited": (PREVIEW, None, None, [8]),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_a_run_reads_holds_and_stores_what_was_planned(
    name: str, flux_folder: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, stored, window, windows = RUNS[name]
    given = RUN | values | {"model.path": str(flux_folder), "data.images": str(photos), "output": str(tmp_path)}
    setting = setting_of(prepare(from_flat(given)))
    sizes: list[int] = []
    group_bytes = Window.group_bytes
    with monkeypatch.context() as patch:
        patch.setattr(Window, "group_bytes", lambda self, group: sizes.append(group_bytes(self, group)) or sizes[-1])
        text = encoding.encode_text(setting)[1]
        whole, features = phases.precompute(setting, text)
    group = bytes_of(features)
    file = group + alternating.HEADER
    given |= {"features.disk": f"{int(stored * file)}B"} if stored is not None else {}
    given |= {"features.window": f"{int(window * sizes[0])}B"} if window is not None else {}
    prepared = prepare(from_flat(given))
    setting = setting_of(prepared)
    plan = make_plan(setting, remember=False, previews=False)

    now, read, found, largest = [""], dict.fromkeys(("precompute", "train", "preview", ""), 0), list[int](), 0
    inside, call, write, phase = Weights.read, Window.__call__, GroupStore.write, Meter.phase

    def reading(self: Weights, names: Any) -> dict[str, torch.Tensor]:
        tensors = inside(self, names)
        if self.folder.name == "transformer":
            read[now[0]] += sum(value.nbytes for value in tensors.values())
        return tensors

    def windowed(self: Window, keys: list[str], *args: Any) -> None:
        found.append(len(keys))
        call(self, keys, *args)

    def writing(store: GroupStore, key: str, tensors: dict[str, torch.Tensor], *args: Any) -> int:
        nonlocal largest
        size = write(store, key, tensors, *args)
        if store.path(key).parent.name == "features":
            assert 0 < size - bytes_of(tensors) <= alternating.HEADER
            largest = max(largest, len(list(store.path(key).parent.glob("*.safetensors"))))
        return size

    @contextmanager
    def measured(meter: Meter, name: str) -> Any:
        now[0] = name
        with phase(meter, name):
            yield
        now[0] = ""

    for owner, attribute, spy in (
        (Weights, "read", reading), (Window, "__call__", windowed), (GroupStore, "write", writing),
        (Meter, "phase", measured),
    ):  # fmt: skip
        monkeypatch.setattr(owner, attribute, spy)
    run(prepared)

    assert found == windows
    before, train = plan.phases["precompute"], plan.phases["train"]
    assert before.read_bytes == read["precompute"] > 0
    micro = given["train.steps"] * given["train.gradient_accumulation_steps"]
    assert train.read_bytes - read["train"] == micro * (train.host["read ahead"] // 3), "and the groups' features"
    assert before.disk_bytes == largest * group
    on_device = phases.precompute(dataclasses.replace(setting, device=torch.device("cuda")), text)[0]
    assert on_device.host["window of states"] == max(windows) * sizes[0]
    assert before.flops_forward * setting.groups == sum(windows) * whole.flops_forward


def test_phases_that_plans_share_know_how_often_a_run_alternates(guided: ModelSource) -> None:
    """What `preview.every` changes without a limit is nothing of precompute's; with one it is."""

    def reads(disk: str | None, every: int) -> tuple[int, int, int]:
        values = RUN | {"features.disk": disk, "preview.prompts": ["a dog"], "preview.every": every}
        setting = make_setting(guided, from_flat(values), torch.device("cpu"))
        plan = make_plan(setting, remember=False, previews=False)
        before, train = plan.phases["precompute"], plan.phases["train"]
        return before.read_bytes, train.read_bytes, before.disk_bytes

    whole, cut = reads(None, 0), reads(None, 1)
    limit = f"{int(4.5 * (whole[2] / 8 + alternating.HEADER))}B"
    limited, both = reads(limit, 0), reads(limit, 1)
    assert whole[0] == cut[0] < limited[0] < both[0]
    assert whole[1] < limited[1] < cut[1] == both[1]
    assert reads(limit, 0) == limited
