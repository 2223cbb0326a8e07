"""The settings are shown without paths of the machine."""

from __future__ import annotations

import dataclasses
import tomllib

import pytest

from blockskip.config import Config, DataConfig, ModelConfig
from blockskip.report.settings import PATHS, without_paths
from blockskip.settings import from_flat, leaves, to_toml


def test_known_paths_keep_their_last_name_only():
    config = dataclasses.replace(
        Config(output="/home/somebody/out/dog"),
        model=ModelConfig(
            path="/home/somebody/models/flux/",
            base_adapters=("C:\\Users\\somebody\\a.safetensors",),
            transformer="somebody/flux1-dev.safetensors",
        ),
        data=DataConfig(images="../somebody/rex", prompt="a photo of sks dog / cat"),
    )
    shown = tomllib.loads(without_paths(to_toml(config)))
    assert shown["output"] == "dog"
    assert shown["model"]["transformer"] == "flux1-dev.safetensors"
    assert shown["model"]["path"] == "flux" and shown["model"]["base_adapters"] == ["a.safetensors"]
    assert shown["data"]["images"] == "rex" and shown["data"]["prompt"] == "a photo of sks dog / cat"
    assert "somebody" not in without_paths(to_toml(config))


@pytest.mark.parametrize(
    "value",
    [
        "/x/somebody/y",
        "~/somebody/y",
        "./somebody/y",
        "..\\somebody\\y",
        "D:/somebody/y",
        "file:///home/somebody/y",
        "\\\\server\\somebody\\y",
    ],
)
def test_any_text_that_looks_local_is_cut(value):
    for key in ("model.path", "skip.rule", "data.prompt"):
        shown = without_paths(to_toml(from_flat({key: value})))
        assert "somebody" not in shown and '"y"' in shown


def test_hub_ids_and_all_other_settings_stay():
    config = from_flat({"model.path": "black-forest-labs/FLUX.1-dev", "train.steps": 7, "data.prompt": "a/b"})
    assert tomllib.loads(without_paths(to_toml(config))) == tomllib.loads(to_toml(config))


def test_the_keys_exist():
    assert set(PATHS) <= set(leaves())


def test_what_is_no_toml_is_not_shown():
    assert without_paths("images = /home/somebody") == ""
