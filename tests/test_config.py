"""Settings: one source for TOML, command line and Python; all that does not fit is told, with the nearest name."""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockskip.config import Config
from blockskip.errors import UserError
from blockskip.settings import from_flat, leaves, read_toml, size_in_bytes, to_flat, to_toml


def problems(values: dict[str, Any]) -> list[str]:
    with pytest.raises(UserError) as caught:
        from_flat(values)
    assert caught.value.exit_code == 2
    return caught.value.problems


def test_defaults_are_the_documented_ones() -> None:
    flat = to_flat(from_flat({}))
    assert from_flat({}) == Config()
    expected = {
        "model.path": "builtin", "train.steps": 500, "train.batch_size": 1, "train.gradient_accumulation_steps": 4,
        "train.learning_rate": 1e-4, "train.lr_scheduler": "constant", "lora.rank": 16, "lora.lora_alpha": None,
        "skip.ratio": 0.5, "data.resolution": None, "patches.direction": "low-to-high", "skip.rule": "residual",
    }  # fmt: skip
    assert {name: flat[name] for name in expected} == expected


def test_every_key_says_what_it_is() -> None:
    for name, (hint, item) in leaves().items():
        assert len(item.metadata["help"]) > 5, name
        assert "_" not in name.partition(".")[0], name
        kinds = {kind for kind in (get_args(hint) or (hint,)) if kind is not type(None)}
        if get_origin(hint) is not tuple and all(isinstance(kind, type) for kind in kinds):
            assert kinds <= {str, int, float, bool}, name


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "data.prompt": st.none() | st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1),
    "model.base_adapters": st.lists(st.text(st.characters(exclude_categories=["Cs", "Cc"]))).map(tuple),
    "data.flip": st.booleans(),
    "skip.ratio": st.floats(0, 0.99),
    "skip.front": st.none() | st.integers(0, 100),
    "train.learning_rate": st.floats(1e-300, 1e300, exclude_min=True),
    "lora.lora_alpha": st.none() | st.floats(1e-10, 1e10),
    "patches.direction": st.sampled_from(["low-to-high", "high-to-low", "random", "fixed"]),
    "sigma.distribution": st.none() | st.sampled_from(["uniform", "logit-normal"]),
    "train.seed": st.integers(0, 2**62),
}


@given(st.fixed_dictionaries({}, optional=VALUES))
def test_what_is_written_is_read_back(values: dict[str, Any]) -> None:
    """config -> TOML -> config, exactly, floats to the last bit."""
    config = from_flat(values)
    document = tomllib.loads(to_toml(config))
    flat = {
        f"{section}.{leaf}" if isinstance(entries, dict) else section: value
        for section, entries in document.items()
        for leaf, value in (entries.items() if isinstance(entries, dict) else [("", entries)])
    }
    assert from_flat(flat) == config
    assert from_flat(to_flat(config)) == config


def test_a_file_is_read_by_section(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('output = "out"\n[train]\nsteps = 7\n[lora]\ntargets = ["to_q"]\n', encoding="utf-8")
    assert read_toml(file) == {"output": "out", "train.steps": 7, "lora.targets": ["to_q"]}
    assert from_flat(read_toml(file)).lora.targets == ("to_q",)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [(b"[train\nsteps = 1", "is not valid TOML"), (b'output = "\xff"', "is not valid TOML")],
)
def test_a_damaged_file_is_named(tmp_path: Path, text: bytes, sentence: str) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(text)
    with pytest.raises(UserError, match=sentence) as caught:
        read_toml(file)
    assert str(file) in str(caught.value)
    with pytest.raises(UserError, match="cannot be read"):
        read_toml(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("train.learning_rte", "train.learning_rate"), ("train.step", "train.steps"), ("trian.steps", "train.steps"),
        ("lora.alpha", "lora.lora_alpha"), ("steps", "train.steps"), ("rank", "lora.rank"), ("promt", "data.prompt"),
        ("flip", "data.flip"), ("outptu", "output"),
    ],
)  # fmt: skip
def test_an_unknown_name_is_told_with_the_nearest(name: str, nearest: str) -> None:
    assert problems({name: 1}) == [f'"{name}" is not a setting; did you mean "{nearest}".']


def test_a_name_like_no_other_is_told() -> None:
    assert problems({"xyzzy": 1}) == ['"xyzzy" is not a setting.']


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("train.steps", 0, "train.steps = 0 is too small; it must be at least 1."),
        ("train.steps", "ten", "train.steps must be a whole number, not 'ten'."),
        ("train.steps", 1.5, "train.steps must be a whole number, not 1.5."),
        ("train.steps", True, "train.steps must be a whole number, not True."),
        ("train.steps", float("inf"), "train.steps must be a finite number, not inf."),
        ("train.steps", float("nan"), "train.steps must be a finite number, not nan."),
        ("train.learning_rate", 0, "train.learning_rate = 0 is too small; it must be above 0."),
        ("train.learning_rate", float("nan"), "train.learning_rate must be a finite number, not nan."),
        ("train.learning_rate", None, "train.learning_rate must be a number, not None."),
        ("skip.ratio", 1, "skip.ratio = 1 is too large; it must be at most 0.99."),
        ("data.flip", "yes", "data.flip must be true or false, not 'yes'."),
        ("data.flip", 1, "data.flip must be true or false, not 1."),
        ("output", 3, "output must be a text, not 3."),
        ("data.prompt", ["a"], "data.prompt must be a text, not ['a']."),
        ("lora.targets", "to_q", "lora.targets must be a list of texts, not 'to_q'."),
        ("lora.targets", [1], "lora.targets must be a list of texts, not [1]."),
        (
            "train.lr_scheduler", "cosin",
            'train.lr_scheduler = "cosin" is not one of "constant", "cosine", "linear"; did you mean "cosine".',
        ),
        (
            "sigma.distribution", "logit_normal",
            'sigma.distribution = "logit_normal" is not one of "uniform", "logit-normal"; did you mean "logit-normal".',
        ),
        ("patches.shape", [], 'patches.shape = "[]" is not one of "square", "picture".'),
    ],
)  # fmt: skip
def test_a_value_that_does_not_fit_is_told(name: str, value: object, sentence: str) -> None:
    assert problems({name: value}) == [sentence]


def test_everything_is_told_at_once() -> None:
    told = problems({"train.steps": 0, "lora.rnk": 4, "skip.ratio": "half", "data.flip": None})
    assert len(told) == 4
    for name, problem in zip(["train.steps", "lora.rnk", "skip.ratio", "data.flip"], told, strict=True):
        assert name in problem


def test_numbers_take_the_type_of_their_key() -> None:
    config = from_flat({"train.steps": 5.0, "train.learning_rate": 1, "lora.lora_alpha": 8})
    assert (config.train.steps, type(config.train.steps)) == (5, int)
    assert type(config.train.learning_rate) is type(config.lora.lora_alpha) is float
    assert from_flat({"data.prompt": ""}).data.prompt is None


def test_a_config_cannot_be_changed_behind_ones_back() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().output = "x"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 512 * 2**20), ("8GiB", 8 * 2**30), ("8GB", 8 * 10**9), ("1e9B", 10**9), ("1.5 KiB", 1536),
        ("2tib", 2**41), ("100b", 100), (" 1kB ", 1000),
    ],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert size_in_bytes("features.disk", text) == size


@pytest.mark.parametrize("text", ["", "lots", "8 Gigs", "-1GiB", "0", "inf", "nan", "1e30", "1e30B", "GiB", "1,5GiB"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(UserError, match=r"features\.disk = .* is not a size; write for example"):
        size_in_bytes("features.disk", text)


@pytest.mark.parametrize("text", ["7", "1e9", " 8 "])
def test_a_number_without_a_unit_is_no_size(text: str) -> None:
    with pytest.raises(UserError, match=rf'^memory\.device = "{text}" has no unit; write for example "512MiB"'):
        size_in_bytes("memory.device", text)
