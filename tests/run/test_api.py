"""What Python programs call: ``blockskip.train`` and ``blockskip.generate``; and what the LoRA file says of itself."""

import getpass
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import blockskip
from blockskip.cli import main
from blockskip.config import Config
from blockskip.encoding.text import encode_prompts
from blockskip.errors import UserError
from blockskip.keys import file_sha256
from blockskip.loading.source import open_model
from blockskip.loading.weights import Weights
from blockskip.preview.draw import Drawing, draw
from blockskip.run import api
from blockskip.settings import from_flat
from tests.run.runs import PROMPT, Run, Runs

DRAWN: dict[str, Any] = {"num_inference_steps": 2, "height": 32, "width": 32}


def same(one: Image.Image, other: Image.Image) -> bool:
    return one.tobytes() == other.tobytes()


def test_train_and_generate(flux_runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's lines, with settings as in Python: paths, and two underscores for the dot."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(flux_runs.images, "photos")
    settings = flux_runs.settings()
    for name in ("model", "images", "prompt"):
        settings.pop(name)
    run = blockskip.train(model=flux_runs.model, images=Path("photos"), prompt=PROMPT, output=Path("out"), **settings)
    images = blockskip.generate(lora="out/", prompt="a photo of sks dog on the beach", **DRAWN)
    images[0].save("beach.png")
    assert run.output == Path("out")
    assert run.adapter == Path("out/adapter/pytorch_lora_weights.safetensors")
    assert run.adapter.read_bytes() == flux_runs.once().adapter
    assert len(run.losses) == 4
    assert [record.name for record in run.records] == ["encode text", "encode pictures", "precompute", "train"]
    assert {path.name for path in Path("out").iterdir()} == {
        "adapter", "checkpoints", "config.toml", "metrics.jsonl", "phases.json", "report.html",
    }  # fmt: skip
    # The same, however the LoRA and the model are named.
    for lora in (Path("out"), "out/adapter", run.adapter):
        assert same(blockskip.generate("a photo of sks dog on the beach", lora, **DRAWN)[0], images[0])
    drawing = Drawing(("a photo of sks dog on the beach",), height=32, width=32, steps=2, text_length=12)
    base = draw(open_model(str(flux_runs.model)), drawing, encode_prompts, torch.float32, run.prepared.device)[0][0]
    assert not same(base, images[0])
    off = blockskip.generate("a photo of sks dog on the beach", "out", lora_scale=0.0, **DRAWN)[0]
    assert same(base, off)


def test_generate_draws_prompts_and_seeds(flux_runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    output = flux_runs.once().output
    single = [
        blockskip.generate(prompt, output, seed=seed, **DRAWN)[0] for prompt in ("a dog", "a cat") for seed in (3, 4)
    ]
    assert len({image.tobytes() for image in single}) == 4
    together = blockskip.generate(["a dog", "a cat"], output, images=2, seed=3, **DRAWN)
    assert all(map(same, together, single))
    sizes = []
    original = api.draw

    def watched(source: Any, drawing: Any, *args: Any) -> Any:
        sizes.append(drawing.batch_size)
        return original(source, drawing, *args)

    monkeypatch.setattr(api, "draw", watched)
    batched = blockskip.generate(("a dog", "a cat"), output, images=2, seed=3, batch_size=4, **DRAWN)
    assert sizes == [4]
    for one, other in zip(batched, single, strict=True):
        assert np.abs(np.asarray(one, dtype=int) - np.asarray(other, dtype=int)).max() <= 1
    streamed = blockskip.generate(["a dog", "a cat"], output, images=2, seed=3, stream=True, **DRAWN)
    assert all(map(same, streamed, single))


@pytest.mark.parametrize("changes", [{}, {"model__dtype": "bfloat16", "train__steps": 1}], ids=["float32", "bfloat16"])
def test_generate_draws_the_previews_again(runs: Runs, changes: dict[str, Any]) -> None:
    """With the run's text length, which is not the model's, and its dtype."""
    shown = {f"preview__{name}": value for name, value in DRAWN.items()}
    run = runs.once(preview__prompts=["a dog"], **shown, **changes)
    (file,) = (run.output / "samples").glob("*.png")
    with Image.open(file) as preview:
        assert same(preview, blockskip.generate("a dog", run.output, **DRAWN)[0])
        if changes:
            assert not same(preview, blockskip.generate("a dog", run.output, dtype="float32", **DRAWN)[0])


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="the processor cannot do it")
def test_generate_has_the_floating_point_mode_of_runs(flux_runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    def smallest(*_: object) -> list[list[float]]:
        return [[torch.tensor([1e-40]).mul(1.0).item()]]

    monkeypatch.setattr(api, "draw", smallest)
    assert blockskip.generate("a dog", model=flux_runs.model) == [0.0]
    assert smallest() != [[0.0]]


def test_generate_on_the_command_line(flux_runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, folder = flux_runs.once().output, tmp_path / "drawn"
    command = ["generate", "--lora", str(output), "--output", str(folder), "--images", "2", "--seed", "3", "--prompt"]
    size = ["--num-inference-steps", "2", "--height", "32", "--width", "32"]
    assert main([*command, "a dog", "a cat", *size]) == 0
    names = ["00-seed3.png", "00-seed4.png", "01-seed3.png", "01-seed4.png"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert [line for line in capsys.readouterr().out.splitlines() if line.endswith(".png")] == [
        str(folder / name) for name in names
    ]
    expected = blockskip.generate(["a dog", "a cat"], output, images=2, seed=3, **DRAWN)
    for name, image in zip(names, expected, strict=True):
        with Image.open(folder / name) as drawn:
            assert same(drawn, image)
    assert main(["generate", "--prompt", "x", "--lora", str(output), "--height", "30"]) == 2
    assert "height" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "nearest"), [("train__stps", "train.steps"), ("promt", "data.prompt"), ("lora_rank", "lora.rank")]
)
def test_a_wrong_name_is_told_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(UserError, match=f'is not a setting; did you mean "{nearest}"'):
        blockskip.train(**{name: 1})


def test_settings_or_a_config() -> None:
    with pytest.raises(UserError, match="either a config or settings"):
        blockskip.train(Config(), output="x")
    with pytest.raises(UserError, match=r"model\.base_adapters must be a list of texts"):
        blockskip.train(model__base_adapters="one.safetensors")
    with pytest.raises(UserError) as caught:
        blockskip.train(from_flat({"output": "x"}))
    assert "data.images is not set" in str(caught.value)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        blockskip.trian  # noqa: B018


def test_generate_refuses_too_few_steps(qwen_image_folder: Path) -> None:
    with pytest.raises(UserError, match=r"^num_inference_steps = 1 is too few"):
        blockskip.generate("x", model=qwen_image_folder, num_inference_steps=1, height=32, width=32)


@pytest.mark.parametrize("changes", [{"dtype": "float8"}, {"device": "gpu"}, {"lora": "nowhere"}, {"height": 30}])
def test_generate_tells_what_is_wrong(flux_runs: Runs, changes: dict[str, Any]) -> None:
    with pytest.raises(UserError) as caught:
        blockskip.generate("x", model=flux_runs.model, **changes)
    key, value = next(iter(changes.items()))
    assert str(value) in str(caught.value) and "preview." not in str(caught.value) and key in str(caught.value)


def test_a_settings_file_of_something_else_is_no_harm(flux_runs: Runs, tmp_path: Path) -> None:
    """A LoRA that lies beside another program's ``config.toml``."""
    shutil.copy(flux_runs.once().file, tmp_path / "mine.safetensors")
    for text in ('model = "something"\n', "[model]\nsize = 3\n", '[data]\ntext_length = "long"\n', "no toml", ""):
        (tmp_path / "config.toml").write_text(text)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(api, "draw", lambda *args: [[args[0].name, args[1].text_length]])
            found = blockskip.generate("x", tmp_path / "mine.safetensors", model=flux_runs.model)
            assert found == [str(flux_runs.model), None]


def test_a_split_that_nobody_measured_is_told(
    flux_runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(api, "run", lambda prepared: prepared)
    monkeypatch.setattr(api, "write_run_report", lambda result: None)
    settings = {"model": str(flux_runs.model), "images": str(flux_runs.images), "prompt": "x", "output": "none"}
    blockskip.train(**settings, skip=0.5)
    told = capsys.readouterr().out
    assert "Nobody has measured which blocks of this model matter" in told and "`blockskip select`" in told
    blockskip.train(**settings, skip__front=1, skip__tail=1)
    assert "Nobody has measured" not in capsys.readouterr().out


def test_a_report_that_fails_loses_nothing(
    flux_runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(result: Any) -> None:
        raise ValueError("no fonts")

    monkeypatch.setattr(api, "write_run_report", fail)
    run = flux_runs(report=True)
    assert run.adapter == flux_runs.once().adapter
    assert "the report could not be written (ValueError: no fonts)" in capsys.readouterr().out


def test_the_file_says_what_it_is(runs: Runs) -> None:
    run, model = runs.once(), runs.model
    header = run.header
    values = {name.removeprefix("transformer."): value for name, value in json.loads(
        header["lora_adapter_metadata"]).items()}  # fmt: skip
    layers = {name.split(".lora_")[0].removeprefix("transformer.") for name in run.tensors}
    assert (values["r"], values["lora_alpha"], set(values["target_modules"])) == (4, 4.0, layers)
    expected = {
        "ss_network_dim": "4", "ss_network_alpha": "4.0", "ss_seed": "0", "ss_steps": "4", "ss_learning_rate": "0.01",
        "ss_resolution": "32", "ss_num_train_images": "5", "ss_base_model_version": model.name,
        "modelspec.trigger_phrase": PROMPT, "blockskip.version": blockskip.__version__,
        "blockskip.skipped": "1+1 of 4", "blockskip.rule": "residual",
        "blockskip.base_sha256": Weights(model / "transformer").identity(),
    }  # fmt: skip
    assert {name: header[name] for name in expected} == expected
    assert all(name.startswith("transformer.") for name in run.tensors)
    assert not any(part in name for name in run.tensors for part in ("base_model", ".default", "_orig_mod", "module."))
    assert {str(value.dtype) for value in run.tensors.values()} == {"torch.float32"}


def test_the_file_tells_nothing_about_the_machine(flux_runs: Runs, tmp_path: Path) -> None:
    """No folder and no user's name, also where paths are settings; the same bytes wherever the run was done."""
    rule = tmp_path / "rules" / "mine.py"
    rule.parent.mkdir()
    rule.write_text("from blockskip.method.skipping import ConstantResidual\nclass Mine(ConstantResidual): pass\n")
    older = tmp_path / "older.safetensors"
    shutil.copy(flux_runs.once().file, older)
    run = flux_runs(skip__rule=f"{rule}:Mine", model__base_adapters=[older], features__cache=tmp_path / "cache")
    length = int.from_bytes(run.adapter[:8], "little")
    header = run.adapter[8 : 8 + length].decode()
    assert run.header["blockskip.rule"] == "Mine"
    for private in (str(tmp_path), str(run.output), str(Path.home()) + "/", str(flux_runs.images), "mine.py"):
        assert private not in header, private
    user = getpass.getuser()
    assert f"/{user}/" not in header
    shutil.copytree(flux_runs.model, tmp_path / flux_runs.model.name)
    shutil.copytree(flux_runs.images, tmp_path / "photos")
    other = Runs(tmp_path / "elsewhere", tmp_path / flux_runs.model.name, tmp_path / "photos")()
    assert file_sha256(other.file) == file_sha256(Run(flux_runs.once().output).file)
