"""The command line: what can be given, and bad input, which is told in one sentence before anything is loaded."""

import importlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blockskip import __version__
from blockskip.cli import main
from blockskip.config import Config
from blockskip.run.adapter import adapter_name
from blockskip.settings import SHORT, leaves
from tests.run.loads import Loads
from tests.tiny import make_flux

Change = Callable[[Path, dict[str, str]], None]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_flux(tmp_path_factory.mktemp("models") / "small", layers=2, single_layers=2)


@pytest.fixture
def good(small: Path, photos: Path, tmp_path: Path) -> dict[str, str]:
    """Options of a run that would do."""
    return {
        "--model": str(small), "--images": str(photos), "--prompt": "a photo of sks dog",
        "--output": str(tmp_path / "out"), "--resolution": "32", "--data.full-resolution": "64",
    }  # fmt: skip


def words(options: dict[str, str]) -> list[str]:
    return ["train", *(part for option in options.items() for part in option)]


def complaints(arguments: list[str], capsys: pytest.CaptureFixture[str], output: Path) -> list[str]:
    """What a command says about bad input: whole sentences on standard error, exit code 2, nothing read or written."""
    there = output.exists()
    with Loads() as loads:
        code = main(arguments)
    out, err = capsys.readouterr()
    assert code == 2, err
    assert out == ""
    assert loads.names == []
    assert output.exists() == there
    lines = err.splitlines()
    assert all(line.startswith("blockskip: ") and line.endswith(".") for line in lines), err
    return [line.removeprefix("blockskip: ") for line in lines]


def option(name: str, value: str) -> Change:
    def change(folder: Path, options: dict[str, str]) -> None:
        options[name] = value

    return change


def without(name: str) -> Change:
    def change(folder: Path, options: dict[str, str]) -> None:
        del options[name]

    return change


def model(change: Callable[[Path], object]) -> Change:
    """A copy of the model, changed."""

    def copy(folder: Path, options: dict[str, str]) -> None:
        shutil.copytree(options["--model"], folder / "model")
        change(folder / "model")
        options["--model"] = str(folder / "model")

    return copy


def rename_class(folder: Path) -> None:
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    (folder / "model_index.json").write_text(json.dumps(index | {"_class_name": "StableDiffusionPipeline"}))


def file(name: str, text: str, *keys: str) -> Change:
    """A file in the test's folder, given to options."""

    def change(folder: Path, options: dict[str, str]) -> None:
        (folder / name).write_text(text, encoding="utf-8")
        options.update({key: str(folder / name) for key in keys})

    return change


def empty_folder(folder: Path, options: dict[str, str]) -> None:
    (folder / "empty").mkdir()
    options["--images"] = str(folder / "empty")


def no_picture(folder: Path, options: dict[str, str]) -> None:
    (folder / "photos").mkdir()
    (folder / "photos" / "1.png").write_bytes(b"no picture")
    options["--images"] = str(folder / "photos")


def below_a_file(folder: Path, options: dict[str, str]) -> None:
    (folder / "file").write_text("x")
    options["--output"] = str(folder / "file" / "out")


BAD: dict[str, tuple[Change, list[str]]] = {
    "option": (option("--train.learning-rte", "1"), ["--train.learning-rte", 'did you mean "--train.learning-rate"']),
    "underscore": (option("--train.learning_rate", "1"), ["--train.learning_rate", '"--train.learning-rate"']),
    "equals": (lambda _, options: options.update({"--stps=3": "4"}), ['"--stps"', '"--steps"']),
    "choice": (option("--train.lr-scheduler", "cosin"), ['train.lr_scheduler = "cosin"', 'did you mean "cosine"']),
    "number": (option("--steps", "ten"), ["train.steps", "whole number", "ten"]),
    "bounds": (option("--skip", "1"), ["skip.ratio = 1.0", "at most 0.99"]),
    "key": (
        file("run.toml", "[train]\nlearning_rte = 1\n", "--config"), ['"train.learning_rte"', '"train.learning_rate"']
    ),
    "section": (file("run.toml", "[trian]\nsteps = 1\n", "--config"), ['"trian.steps"', "train.steps"]),
    "toml": (file("run.toml", "[train\n", "--config"), ["run.toml", "not valid TOML"]),
    "no toml": (option("--config", "none.toml"), ["none.toml", "cannot be read"]),
    "no images": (without("--images"), ["data.images is not set"]),
    "no folder": (option("--images", "nowhere"), ['data.images = "nowhere" does not exist']),
    "empty folder": (empty_folder, ["data.images", "is an empty folder"]),
    "no picture": (no_picture, ["1.png", "not a picture that can be read"]),
    "no prompt": (without("--prompt"), ["No caption for", "data.prompt"]),
    "no output": (without("--output"), ["output is not set"]),
    "output is a file": (file("file", "", "--output"), ["output = ", "is a file"]),
    "output in a file": (below_a_file, ["output = ", "is a file"]),
    "cache is a file": (file("file", "", "--features.cache"), ["features.cache = ", "is a file"]),
    "no block": (
        lambda _, o: o.update({"--skip.front": "3", "--skip.tail": "1"}), ["skip: front = 3", "no block of 4"]
    ),
    "ratio": (option("--skip", "0.95"), ["skip", "0.95", "no block of 4"]),
    "target": (option("--lora.targets", "to_qq"), ["lora.targets", '"to_qq" matches no linear layer', "attn.to_q"]),
    "stride": (option("--resolution", "36"), ["data.resolution = 36", "multiple of the model's 8 pixels", "32 or 40"]),
    "sizes": (option("--resolution", "72"), ["data.resolution = 72", "larger than data.full_resolution = 64"]),
    "window": (option("--features.window", "lots"), ['features.window = "lots" is not a size']),
    "disk": (option("--features.disk", "0GiB"), ['features.disk = "0GiB" is not a size']),
    "no unit": (option("--memory", "8"), ['memory.device = "8" has no unit', '"8GiB"']),
    "below zero": (option("--memory", "-1GiB"), ['memory.device = "-1GiB" is not a size', '"8GiB"']),
    "window below zero": (option("--features.window", "-.5GiB"), ['features.window = "-.5GiB" is not a size']),
    "device": (option("--device", "gpu"), ['train.device = "gpu" is not a device']),
    "mps": (option("--device", "mps"), ["train.device", "no Apple GPU"]),
    "class prompt": (
        lambda _, o: o.update({"--data.class-images": o["--images"]}), ["data.class_images", "data.class_prompt"]
    ),
    "base adapter": (option("--model.base-adapters", "none.safetensors"), ["none.safetensors", "holds no LoRA"]),
    "no LoRA": (file("x.safetensors", "", "--model.base-adapters"), ["model.base_adapters", "x.safetensors", "cannot"]),
    "rule": (option("--skip.rule", "residul"), ['skip.rule = "residul"']),
    "rule file": (lambda _, o: o.update({"--skip.rule": "none.py:Mine"}), ['skip.rule = "none.py:Mine"']),
    "preview": (
        lambda _, o: o.update({"--preview.prompts": "a dog", "--preview.height": "60"}),
        ["preview.height = 60", "take 64"],
    ),
    "no model": (option("--model", "nowhere"), ['model.path = "nowhere"']),
    "single file": (file("model.safetensors", "", "--model"), ["model.safetensors", "is a single file"]),
    "no pipeline": (model(lambda m: (m / "model_index.json").unlink()), ["model.path", '_index.json" is missing']),
    "damaged index": (model(lambda m: (m / "model_index.json").write_text("{")), ["model.path", "index.json is dam"]),
    "other class": (model(rename_class), ["StableDiffusionPipeline", "not supported", "FluxPipeline", "SanaPipeline"]),
    "no part": (model(lambda f: shutil.rmtree(f / "vae")), ["model.path", "lacks vae"]),
    "damaged part": (model(lambda f: (f / "vae" / "config.json").write_text("{")), ["model.path", "config.json"]),
}  # fmt: skip
if not torch.cuda.is_available():
    BAD["cuda"] = option("--device", "cuda"), ["train.device", "no CUDA device"]


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence(
    name: str, good: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, fragments = BAD[name]
    change(tmp_path, good)
    output = Path(good.get("--output", tmp_path / "out"))
    if "is a file" in fragments:
        output = tmp_path / "out"
    (sentence,) = complaints(words(good), capsys, output)
    for fragment in fragments:
        assert fragment in sentence


def test_a_dtype_that_the_device_lacks_is_one_sentence(
    good: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def like_an_older_mac(*_: Any, **__: Any) -> None:
        raise TypeError("BFloat16 is not supported on MPS")

    for module in ("prepare", "api"):
        found = importlib.import_module(f"blockskip.run.{module}")
        monkeypatch.setattr(found, "resolve_device", lambda *_: torch.device("mps"))
    monkeypatch.setattr(torch, "ones", like_an_older_mac)
    (sentence,) = complaints(words(good), capsys, tmp_path / "out")
    assert sentence == 'model.dtype = "bfloat16" is not supported by mps on this machine; use "float32".'
    command = ["generate", "--prompt", "x", "--model", good["--model"], "--output", str(tmp_path / "drawn")]
    (sentence,) = complaints(command, capsys, tmp_path / "drawn")
    assert sentence == 'dtype = "bfloat16" is not supported by mps on this machine; use "float32".'


def test_several_problems_are_told_at_once(
    good: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("no output", "no folder", "target", "window", "device", "rule", "class prompt"):
        BAD[name][0](tmp_path, good)
    told = complaints(words(good), capsys, tmp_path / "out")
    for name in ("output is", "data.images", "features.window", "train.device", "skip.rule", "class_images", "targets"):
        assert sum(name in sentence for sentence in told) == 1, name
    # Without a model nothing can be said about targets; the pictures are still looked at.
    good |= {"--model": "nowhere"}
    told = complaints(words(good), capsys, tmp_path / "out")
    assert any("model.path" in sentence for sentence in told)
    assert any('data.images = "nowhere" does not exist' in sentence for sentence in told)
    two = complaints(["train", "--imags", "x", "--outptu", "y"], capsys, tmp_path / "out")
    assert ["--images" in two[0], "--output" in two[1], len(two)] == [True, True, 2]
    three = complaints(["train", "--steps", "0", "--rank", "x", "--skip", "2"], capsys, tmp_path / "out")
    assert len(three) == 3


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        ([], ["verb", "`blockskip --help`"]),
        (["trian"], ["invalid choice", "train"]),
        (["generate"], ["--prompt", "`blockskip generate --help`"]),
        (["train", "--steps"], ["--steps", "expected one argument"]),
        (["generate", "--prompt", "x", "--images", "0"], ["--images must be at least 1"]),
        (["generate", "--prompt", "x", "--seed", "x"], ["--seed", "invalid int"]),
        (["generate", "--prompt", "x", "--lora", "nowhere"], ["nowhere", "holds no LoRA"]),
        (["generate", "--prompt", "x", "--guidance", "1"], ["--guidance", "--guidance-scale"]),
    ],
)
def test_bad_commands(
    arguments: list[str], fragments: list[str], small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if arguments[:1] == ["generate"] and "--prompt" in arguments:
        arguments = [*arguments, "--model", str(small), "--output", str(tmp_path / "drawn")]
    (sentence,) = complaints(arguments, capsys, tmp_path / "drawn")
    for fragment in fragments:
        assert fragment in sentence


def test_help_names_every_key(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as caught:
        main(["train", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    flat = " ".join(text.split())
    for name, (_, item) in leaves().items():
        assert " ".join(item.metadata["help"].split()) in flat, name
        assert re.search(f"--{name.replace('_', '-')}[ ,]", flat), name
    assert all(f"  --{name} " in text for name in SHORT)
    for shown in ("{constant,cosine,linear}", "{uniform,logit-normal}", "(default: 500)", "--no-data.flip"):
        assert shown in text
    assert "SUPPRESS" not in text
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("verb", ["generate", "demo"])
def test_help_explains_every_option(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    text = capsys.readouterr().out
    for line in text.partition("options:")[2].splitlines():
        if line.startswith("  --"):
            names, _, explained = line.strip().partition("  ")
            following = text.partition(line)[2].splitlines()
            assert explained.strip() or following[1].startswith("      "), names


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.strip() == f"blockskip {__version__}"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--data.prompt", "none"], ("data.prompt", "none")),
        (["--prompt", ""], ("data.prompt", None)),
        (["--skip.front", "none"], ("skip.front", None)),
        (["--sigma.distribution", "none"], ("sigma.distribution", None)),
        (["--train.learning-rate", "1e-3"], ("train.learning_rate", 1e-3)),
        (["--data.flip"], ("data.flip", True)),
        (["--no-features.keep"], ("features.keep", False)),
        (["--preview.prompts", "a dog", "a cat"], ("preview.prompts", ("a dog", "a cat"))),
        (["--preview.prompts"], ("preview.prompts", ())),
        (["--skip.rule", "none"], ("skip.rule", "none")),
    ],
)
def test_options_become_values(
    given: list[str], expected: tuple[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also over a file that says otherwise: options come last."""
    taken: list[Any] = []

    def take(config: Any) -> Any:
        taken.append(config)
        return SimpleNamespace(adapter=Path("adapter"), output=Path("out"))

    monkeypatch.setattr("blockskip.run.train", take)
    toml = 'output = "o"\n[data]\nprompt = "x"\n[skip]\nfront = 1\n[train]\nsteps = 7\n[features]\nkeep = true\n'
    (tmp_path / "run.toml").write_text(toml + '[preview]\nprompts = ["y"]\n')
    assert main(["train", "--config", str(tmp_path / "run.toml"), *given]) == 0
    section, _, leaf = expected[0].partition(".")
    assert getattr(getattr(taken[0], section), leaf) == expected[1]
    assert taken[0].train.steps == 7


@pytest.mark.parametrize(("blocks", "what"), [(0, "LoRA"), (1, "Changed weights")])
def test_what_was_trained_is_called_what_it_is(
    blocks: int, what: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(config: Config) -> Any:
        return SimpleNamespace(adapter=Path("out") / adapter_name(config), output=Path("out"))

    monkeypatch.setattr("blockskip.run.train", made)
    assert main(["train", "--train.lisa-blocks", str(blocks)]) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith(f"{what}: {Path('out')}")


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried"), MemoryError(), RuntimeError("CPU: out of memory")]
)
def test_out_of_memory_says_what_to_try(
    error: Exception, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(config: object) -> None:
        raise error

    monkeypatch.setattr("blockskip.run.train", fail)
    assert main(["train"]) == 3
    told = capsys.readouterr().err
    reason = str(error) or "MemoryError"
    assert told.startswith(f"blockskip: Out of memory outside the phases of a run ({reason}); what was written is")
    for advice in ("Close other programs", "smaller model", "smaller pictures"):  # a phase says by itself what to try
        assert advice in told
    monkeypatch.setattr("blockskip.run.train", lambda config: {}["a fault of ours is not hidden"])
    with pytest.raises(KeyError):
        main(["train"])
