"""Options that argparse alone does not tell well: sizes in two words and below zero, and a reader who leaves."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from blockskip.cli import main
from blockskip.options import SIZE_OPTIONS, add_settings, given_values, joined_sizes


def told(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The sentences about bad input."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert all(line.startswith("blockskip: ") and line.endswith(".") for line in err.splitlines()), err
    return [line.removeprefix("blockskip: ") for line in err.splitlines()]


@pytest.mark.parametrize(
    ("arguments", "sentences"),
    [
        (["--memory", "8", "GB"], ['--memory 8 GB are two words for one size; write --memory 8GB or --memory "8 GB".']),
        (["--rank", "2", "--host-memory=1.5", "gib", "--steps", "0"], ["--host-memory 1.5 gib are two words"]),
        (["--memory", "8", "GB", "--features.disk", "8", "MB"], ["--memory 8 GB are", "--features.disk 8 MB are"]),
    ],
)
@pytest.mark.parametrize("verb", ["train", "plan"])
def test_a_size_in_two_words_is_told_how_to_be_written(
    verb: str, arguments: list[str], sentences: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = told([verb, *arguments], capsys)
    assert len(found) == len(sentences)
    for sentence, begun in zip(found, sentences, strict=True):
        assert sentence.startswith(begun)


def test_words_of_other_options_are_left_alone() -> None:
    for words in (["--preview.prompts", "8", "GB"], ["--memory", "8GB", "GB"], ["--memory", "8 GB"], ["8", "GB"]):
        assert joined_sizes(words) == (words, [])
    assert joined_sizes(["--memory", "8GB", "-2GB", "--seed", "-1"]) == (
        ["--memory", "8GB", "--memory=-2GB", "--seed", "-1"], [],
    )  # fmt: skip
    assert {"--memory", "--memory.device", "--disk", "--features.window"} < SIZE_OPTIONS


def test_sizes_are_told_with_all_else_that_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--memory", "-1GiB", "--disk", "3", "--features.window", "lots"]
    names = ('memory.device = "-1GiB" is not', 'memory.disk = "3" has no unit', 'features.window = "lots" is not')
    for verb, others, wrong in (
        ("train", ["--steps", "0"], ["train.steps"]),
        ("plan", ["--steps", "0"], ["train.steps"]),
        ("plan", ["--model", "nowhere", "--device", "tpu"], ["model.path", "train.device"]),
        ("train", ["--model", "nowhere", "--images", "none"], ["output is not set", "data.images", "model.path"]),
    ):
        found = told([verb, *sizes, *others], capsys)
        assert len(found) == len(names) + len(wrong), found
        for name in (*names, *wrong):
            assert sum(name in sentence for sentence in found) == 1, name


def test_what_is_given_as_an_option_is_of_no_file_and_of_no_preset(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[train]\nsteps = 3\nseed = 4\n[lora]\nrank = 5\n")
    parser = argparse.ArgumentParser()
    add_settings(parser)
    words = ["--preset", "flux/8gb", "--config", str(tmp_path / "run.toml"), "--steps", "7", "--skip", "0.4"]
    values, origins = given_values(parser.parse_args(words))
    assert (values["train.steps"], values["train.seed"], values["skip.ratio"]) == (7, 4, 0.4)
    assert origins.keys() == values.keys() - {"train.steps", "skip.ratio"}
    assert origins["lora.rank"] == origins["train.seed"] == f'in "{tmp_path / "run.toml"}"'
    assert origins["model.path"] == "of the preset flux/8gb, which options override,"


@pytest.mark.parametrize("verb", ["families", "--help"])
def test_who_reads_no_further_gets_no_traceback(verb: str) -> None:
    """As `| head -1` does: the reader's end is closed before all is written."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "blockskip.cli", verb]
    environment = os.environ | {"PYTHONUNBUFFERED": ""}
    with os.fdopen(writer, "w") as pipe:
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (141, "")
