"""``blockskip families``: every family and built-in model is in the table, and what is refused is told why."""

import json

import diffusers
import pytest

from blockskip.cli import main
from blockskip.errors import UserError
from blockskip.families import FAMILIES, REFUSED, family_of
from blockskip.planner import named_models
from blockskip.planner.supported import supported
from blockskip.presets.cards import preset_names


def test_every_family_and_every_built_in_model_is_there() -> None:
    rows = supported()
    assert {row.family for row in rows} == {family.name for family in FAMILIES}
    assert sorted(row.model for row in rows if row.model) == named_models()
    for row in rows:
        assert (row.parameters is None) == (row.model is None) == (not row.blocks)
    flux = next(row for row in rows if row.model == "black-forest-labs/FLUX.1-dev")
    assert (flux.parameters, flux.blocks, flux.text_length, flux.loader) == (11_901_408_320, (19, 38), 512, "pipeline")
    loaders = {row.family: row.loader for row in rows}
    by_peft = {"pixart_sigma", "pixart_alpha", "longcat_image", "ovis_image", "bria"}
    assert {name for name, loader in loaders.items() if loader == "PEFT"} == by_peft
    assert sorted(name for row in rows for name in row.presets) == sorted(preset_names())
    assert flux.presets == tuple(f"flux/{card}" for card in ("6gb", "8gb", "12gb", "16gb", "24gb", "cpu"))


def test_it_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["families"]) == 0
    text = capsys.readouterr().out
    (line,) = (line for line in text.splitlines() if line.startswith("black-forest-labs/FLUX.1-dev "))
    assert line.split() == [
        "black-forest-labs/FLUX.1-dev", "FluxPipeline", "11.90", "B", "19", "+", "38", "512", "pipeline",
        "flux",
    ]  # fmt: skip
    assert "Not supported: HunyuanDiTPipeline, HunyuanDiT2DModel: its last blocks read" in text


def test_json_has_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["families", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["model"] for row in found["families"]] == [row.model for row in supported()]
    assert found["refused"] == REFUSED


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_told_why(name: str) -> None:
    assert hasattr(diffusers, name)
    with pytest.raises(UserError, match="long skip connections"):
        family_of(name)
