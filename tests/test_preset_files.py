"""``--preset``: every file is what the planner's rows make, can be used, and comes before --config and options."""

import re
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import cards, presets
from blockskip.cli import main
from blockskip.config import Config
from blockskip.errors import UserError
from blockskip.loading.resolved import conflicts, resolutions, split_of
from blockskip.loading.transformer import empty_transformer
from blockskip.planner import named_models
from blockskip.planner.named import open_for_plan
from blockskip.presets.cards import preset_names, presets_by_model, read_preset
from blockskip.settings import from_flat

CARDS = ("6gb", "8gb", "12gb", "16gb", "24gb", "cpu")


def test_the_files_are_made_from_the_rows() -> None:
    assert presets.on_disk() == presets.files()


def test_every_model_has_a_preset_for_every_card_on_which_it_fits() -> None:
    rows = [row for row in cards.read() if row.card in presets.SIZES] + presets.read_cpu()
    assert len(preset_names()) == sum(row.fits for row in rows)
    assert sorted(presets_by_model()) == named_models()
    for names in presets_by_model().values():
        assert len({name.partition("/")[0] for name in names}) == 1
        places = [CARDS.index(name.partition("/")[2]) for name in names]
        assert places == sorted(places)


@pytest.mark.parametrize("model", sorted(presets_by_model()))
def test_a_preset_is_a_config_that_its_model_can_have(model: str) -> None:
    source = open_for_plan(model)[0]
    empty = empty_transformer(source)
    count = source.family.layout.count(empty)
    for name in presets_by_model()[model]:
        config = from_flat(read_preset(name))  # unknown keys and values are errors
        assert not conflicts(config)
        split, _ = split_of(config, source.family, empty)
        assert 0 < split.front + split.tail < count
        full, resolution = resolutions(config, source)
        assert resolution <= full and resolution % source.pixel_stride == 0
        assert (config.data.images, config.data.prompt, config.output) == ("", None, "")
        assert (config.train.device == "cpu") == name.endswith("/cpu")


def test_the_package_has_the_files_and_each_begins_with_its_commands() -> None:
    folder = resources.files("blockskip.presets")
    for name in preset_names():
        model, _, card = name.partition("/")
        text = folder.joinpath(model).joinpath(f"{card}.toml").read_text(encoding="utf-8")
        head = text.partition("\n\n")[0]
        commands = re.findall(r"^#     (blockskip .*)$", head, re.MULTILINE)
        device = "" if card == "cpu" else " --device cuda"
        assert commands == [
            f'blockskip train --preset {name} --images photos/ --prompt "a photo of sks dog" --output out/',
            f"blockskip plan --preset {name}{device}",
        ]
        assert head.startswith(f"# {read_preset(name)['model.path']} ")


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configs with which ``train`` is called; nothing is trained."""
    found: list[Config] = []

    def take(config: Config) -> Any:
        found.append(config)
        return SimpleNamespace(adapter=Path("adapter"), output=Path("out"))

    monkeypatch.setattr("blockskip.run.train", take)
    return found


def test_options_come_before_the_file_and_the_file_before_the_preset(taken: list[Config], tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[train]\nsteps = 7\n[data]\nresolution = 128\n[skip]\nratio = 0.4\n", encoding="utf-8")
    command = ["train", "--preset", "flux/8gb", "--config", str(file), "--skip", "0.2", "--prompt", "a dog"]
    assert main(command) == 0
    (config,) = taken
    preset = read_preset("flux/8gb")
    assert preset["data.resolution"] == 256 and preset["skip.ratio"] == 0.3
    assert (config.skip.ratio, config.data.resolution, config.train.steps, config.data.prompt) == (0.2, 128, 7, "a dog")
    assert config.model.path == "black-forest-labs/FLUX.1-dev" and config.model.quantization == "nf4"
    assert main(["train", "--preset", "flux/8gb"]) == 0
    assert taken[1] == from_flat(preset)


def test_the_plan_of_a_preset_is_the_one_it_was_made_from(capsys: pytest.CaptureFixture[str]) -> None:
    name = "sana-0.6b/8gb"
    assert main(["plan", "--preset", name, "--device", "cuda"]) == 0
    text = capsys.readouterr().out
    head = presets.on_disk()[name]
    ((device, phase),) = re.findall(r"([\d.]+ GiB) of the card's memory \(in ([\w ]+)\)", head)
    (host,) = re.findall(r"([\d.]+ GiB) of the host's", head)
    (disk,) = re.findall(r"([\d.]+ GiB) of disk", head)
    assert f"Device memory at most: {device}, in {phase}" in text
    assert f"Host memory at most: {host}" in text
    assert f"Disk at most: {disk}" in text


@pytest.mark.parametrize(
    ("name", "fragment"),
    [
        ("flux/7gb", "of flux there are 6gb, 8gb, 12gb, 16gb, 24gb, cpu."),
        ("flux", "of flux there are 6gb"),
        ("flx/8gb", 'did you mean "flux/8gb".'),
        ("../presets/flux/8gb", "not a preset"),
        ("x", "write model/card, with a model of aura-flow, "),
    ],
)
def test_an_unknown_preset_is_told_with_those_there_are(
    name: str, fragment: str, taken: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError):
        read_preset(name)
    for verb in ("train", "plan"):
        assert main([verb, "--preset", name]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f'blockskip: "{name}" is not a preset') and fragment in line
    assert taken == []
