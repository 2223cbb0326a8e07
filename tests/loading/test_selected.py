"""`skip.selection`: the split of a result file, in a run, in a plan, and in the config that is written."""

import json
from pathlib import Path
from typing import Any

import pytest

from blockskip.errors import UserError
from blockskip.loading.selected import selected_split
from blockskip.method.split import Split
from blockskip.planner.request import make_request
from blockskip.run import prepare
from blockskip.settings import from_flat


def write(path: Path, **changes: Any) -> str:
    def sweep(*means: float) -> list[dict[str, float]]:
        return [{"mean": mean} for mean in means]

    distances = {"front": sweep(0.1, 0.5, 0.9, 0.95), "back": sweep(0.1, 0.2, 0.3, 0.8)}
    document = {"format": 1, "family": "flux", "blocks": [3, 5], "distances": distances} | changes
    path.write_text(json.dumps(document), encoding="utf-8")
    return str(path)


def test_the_split_of_each_ratio(tmp_path: Path) -> None:
    file = write(tmp_path / "selection.json")
    assert selected_split(file, "flux", (3, 5), 0.25) == Split(1, 1)  # 0.1 + 0.1
    assert selected_split(file, "flux", (3, 5), 0.375) == Split(0, 3)  # 0.3 = 0.1 + 0.2: of equals the smaller tail
    assert selected_split(str(tmp_path), "flux", (3, 5), 0.5) == Split(1, 3)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"format": 2}, "another version"),
        ({"family": "sana"}, "is of sana with 3 [+] 5 blocks, the model is flux with 3 [+] 5"),
        ({"blocks": [4, 4]}, "is of flux with 4 [+] 4 blocks"),
        ({"distances": {"front": []}}, "no result of"),
        ({"distances": {"front": [{"mean": "x"}], "back": []}}, "no result of"),
        ({"distances": {"front": [{"mean": float("nan")}] * 6, "back": [{"mean": 1.0}] * 6}}, "no result of"),
        ({"distances": {"front": [{"mean": 0.1}], "back": [{"mean": 0.1}]}}, "up to 1 blocks, and skip.ratio = 0.5"),
    ],
)
def test_what_cannot_be_used_is_told(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        selected_split(write(tmp_path / "s.json", **changes), "flux", (3, 5), 0.5)
    assert "skip.selection" in str(caught.value)


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        selected_split(str(tmp_path / "none.json"), "flux", (3, 5), 0.5)
    (tmp_path / "cut.json").write_text('{"format": 1, "fam')
    with pytest.raises(UserError, match="damaged"):
        selected_split(str(tmp_path / "cut.json"), "flux", (3, 5), 0.5)
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(UserError, match="damaged"):
        selected_split(str(tmp_path / "list.json"), "flux", (3, 5), 0.5)


def test_a_run_and_its_plan_use_it_and_the_written_config_has_the_numbers(
    tmp_path: Path, flux_folder: Path, photos: Path
) -> None:
    values = {
        "model.path": str(flux_folder), "data.images": str(photos), "data.prompt": "a dog",
        "output": str(tmp_path / "out"), "skip.selection": write(tmp_path / "selection.json"), "skip.ratio": 0.5,
        "data.full_resolution": 64,
    }  # fmt: skip
    prepared = prepare(from_flat(values))
    assert prepared.split == Split(1, 3)
    skip = prepared.config.skip
    assert (skip.front, skip.tail, skip.selection) == (1, 3, None)
    assert prepare(prepared.config).split == Split(1, 3)
    assert make_request(from_flat(values)).setting.split == Split(1, 3)
    other = prepare(from_flat(values | {"skip.selection": None}))
    assert other.split == Split(3, 1) and other.split_source is None
    assert prepared.fingerprint()["skip.front"] != other.fingerprint()["skip.front"]
    assert other.fingerprint()["split of that skip.ratio"] == "3, 1"
    with pytest.raises(UserError, match="give either the file or the numbers"):
        prepare(from_flat(values | {"skip.front": 1}))
