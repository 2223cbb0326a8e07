"""Whole runs whose transformer comes from a single file: bit for bit those of the diffusers folder."""

import os
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import blockskip
from blockskip.benchmark import model as benchmark_model
from blockskip.benchmark import trained
from blockskip.benchmark.request import Request as BenchmarkRequest
from blockskip.benchmark.settings import SETTINGS
from blockskip.benchmark.subjects import Subject as BenchmarkSubject
from blockskip.cli import main
from blockskip.errors import UserError
from blockskip.loading.source import open_model
from blockskip.loading.weights import Weights
from blockskip.selection import model as selection_model
from blockskip.selection import subjects
from blockskip.selection.request import Request as SelectionRequest
from tests.originals import PREFIX, write_original
from tests.run.loads import Loads
from tests.run.runs import PROMPT, Run, Runs, Written

NAME = "diffusion_pytorch_model.safetensors"
DRAWN: dict[str, Any] = {"height": 32, "width": 32, "num_inference_steps": 2}


class Single:
    """A model as users of other programs have it: a file, and a pipeline without the transformer's weights."""

    def __init__(self, runs: Runs, family: str, folder: Path) -> None:
        self.model = shutil.copytree(runs.model, folder / "model")
        (self.model / "transformer" / NAME).unlink()
        self.original = write_original(family, runs.model, folder / f"{family}1-dev.safetensors", PREFIX)
        self.plain = shutil.copy(runs.model / "transformer" / NAME, folder / "plain.safetensors")

    def settings(self, file: Path) -> dict[str, Any]:
        return {"model": self.model, "model__transformer": file}


@pytest.fixture(params=["flux", "sana"])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Runs, Single]:
    runs: Runs = request.getfixturevalue(f"{request.param}_runs")
    return runs, Single(runs, request.param, tmp_path)


def same(one: Run, other: Run) -> bool:
    """The losses and every bit of the adapter."""
    found, expected = one.tensors, other.tensors
    return one.metrics == other.metrics and found.keys() == expected.keys() and all(
        torch.equal(found[name], value) for name, value in expected.items()
    )  # fmt: skip


def test_a_run_is_that_of_the_folder(case: tuple[Runs, Single], tmp_path: Path) -> None:
    """Its folder says so, and repeats it; previews and later pictures are drawn with it too."""
    runs, single = case
    preview = {"preview__prompts": ["a dog"], **{f"preview__{name}": value for name, value in DRAWN.items()}}
    expected = runs.once(**preview)
    run = runs(**preview, **single.settings(single.original))
    assert same(run, expected)
    assert run.config["model"]["transformer"] == str(single.original)
    assert run.header["ss_base_model_version"] == single.original.stem
    assert str(tmp_path) not in str(run.header)
    (picture,), (other,) = ((one.output / "samples").glob("*.png") for one in (run, expected))
    assert picture.read_bytes() == other.read_bytes()
    assert run.header["blockskip.base_sha256"] == expected.header["blockskip.base_sha256"]
    # without a model, and with one
    images = [blockskip.generate("a cat", one.output, **DRAWN)[0] for one in (run, expected)]
    named = blockskip.generate("a cat", run.output, model=single.model, transformer=single.plain, **DRAWN)[0]
    assert images[0].tobytes() == images[1].tobytes() == named.tobytes()
    # config.toml is all that another run needs
    document = tomllib.loads((run.output / "config.toml").read_text(encoding="utf-8"))
    document["output"] = str(tmp_path / "again")
    flat = {f"{section}__{name}": value for section, entries in document.items() if isinstance(entries, dict)
            for name, value in entries.items()}  # fmt: skip
    blockskip.train(output=document["output"], **flat)
    assert same(Run(tmp_path / "again"), expected)


@pytest.mark.parametrize("changes", [
    {"skip__tail_mode": "stream"}, {"train__stream_middle": True}, {"train__lisa_blocks": 1, "skip__ratio": 0.0},
    {"model__quantization": "int8"},
], ids=lambda changes: next(iter(changes)))  # fmt: skip
def test_whatever_reads_the_transformer_reads_the_file(
    flux_runs: Runs, changes: dict[str, Any], tmp_path: Path
) -> None:
    if "model__quantization" in changes:
        pytest.importorskip("bitsandbytes")
    single = Single(flux_runs, "flux", tmp_path)
    run, expected = flux_runs(**changes, **single.settings(single.original)), flux_runs.once(**changes)
    if "train__lisa_blocks" in changes:
        files = [load_file(one.output / "adapter" / "weights_difference.safetensors") for one in (run, expected)]
        assert run.metrics == expected.metrics and files[0].keys() == files[1].keys()
        assert all(torch.equal(files[0][name], value) for name, value in files[1].items())
    else:
        assert same(run, expected)


def test_what_is_stored_is_known_by_the_file_s_bytes(flux_runs: Runs, tmp_path: Path) -> None:
    """The same tensors share the folder's store; another file at its place does not."""
    single, cache = Single(flux_runs, "flux", tmp_path), {"features__cache": tmp_path / "cache"}

    def computed(**settings: Any) -> tuple[int, int, int]:
        with Written() as written:
            flux_runs(**cache, **settings)
        return written.counts

    _, _, groups = computed()
    assert groups > 0
    for file in (single.plain, single.original):
        assert computed(**single.settings(file)) == (0, 0, 0)
    for file in (single.plain, single.original):
        tensors = load_file(file)
        next(value for value in tensors.values() if value.ndim == 2)[0, 0] += 0.01
        save_file(tensors, file)
        os.utime(file, ns=(7, 7))
        assert computed(**single.settings(file)) == (0, 0, groups)


def test_a_run_goes_on_with_the_same_file_elsewhere_and_with_no_other(flux_runs: Runs, tmp_path: Path) -> None:
    single, output = Single(flux_runs, "flux", tmp_path), tmp_path / "out"
    (tmp_path / "other").mkdir()
    elsewhere = shutil.copy(single.original, tmp_path / "other" / "renamed.safetensors")
    flux_runs(output, train__steps=2, **single.settings(single.original))
    flux_runs(output, train__steps=3, **single.settings(elsewhere))
    tensors = load_file(elsewhere)
    save_file({name: value * 1.01 for name, value in tensors.items()}, elsewhere)
    with pytest.raises(UserError, match="base model"):
        flux_runs(output, train__steps=4, **single.settings(elsewhere))


def test_a_plan_converts_nothing_and_says_what_will_be(
    flux_runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    single, shared = Single(flux_runs, "flux", tmp_path), {"resolution": 32, "data__full_resolution": 64, "steps": 3}
    plans = [blockskip.plan(model=flux_runs.model, device="cpu", **shared)]
    monkeypatch.setenv("BLOCKSKIP_CACHE", str(tmp_path / "cache"))
    plans += [blockskip.plan(device="cpu", **shared, **single.settings(f)) for f in (single.original, single.plain)]
    assert not (tmp_path / "cache" / "transformers").exists() and not (tmp_path / "cache" / "weights.json").exists()
    phases = [plan.as_json()["phases"] for plan in plans]
    assert phases[0] == phases[1] == phases[2]
    told = [[text for text in plan.remarks if "converts" in text] for plan in plans]
    assert [len(texts) for texts in told] == [0, 1, 0]
    assert told[1][0].startswith("The first run converts flux1-dev.safetensors: ") and "of disk" in told[1][0]


def test_the_jobs_of_many_runs_take_it(flux_runs: Runs, tmp_path: Path) -> None:
    single, file = Single(flux_runs, "flux", tmp_path), {}
    file = {"model": str(single.model), "transformer": str(single.original)}
    base = Weights(open_model(str(single.model), transformer=str(single.original)).part_folder("transformer"))
    selecting = SelectionRequest(**file, images=(str(flux_runs.images),), height=32, width=32)
    chosen = selection_model.open_for(selecting)
    assert chosen.identity[0] == base.identity()
    plain = subjects.prepare_plain(
        chosen, subjects.Subject("dog", flux_runs.images, PROMPT, (PROMPT,)), tmp_path / "lora"
    )
    assert plain.source.single is not None and plain.config.model.transformer == str(single.original)
    asked = BenchmarkRequest(**file, subjects_from=str(tmp_path), height=32, width=32)
    assert BenchmarkRequest.from_json(asked.as_json()) == asked
    measured = benchmark_model.open_for(asked)
    assert measured.identity[0] == base.identity() and measured.source.single is not None
    dog = BenchmarkSubject("dog", str(flux_runs.images), (), (), (), PROMPT, ())
    values = trained.configured(measured, SETTINGS["lora"], dog, 0)
    assert values["model.transformer"] == str(single.original)
    # where the file lies makes no other training of it
    assert "model.transformer" in trained.PLACES


def damaged(single: Single) -> Path:
    single.original.write_bytes(single.original.read_bytes()[:-10])
    return single.original


def another_size(single: Single) -> Path:
    tensors = load_file(single.plain)
    save_file(tensors | {"x_embedder.weight": torch.zeros(32, 64)}, single.plain)
    return single.plain


@pytest.mark.parametrize("verb", ["train", "plan", "generate", "select", "benchmark"])
@pytest.mark.parametrize("spoil", [damaged, another_size])
def test_a_wrong_file_is_one_sentence_before_anything(
    flux_runs: Runs, verb: str, spoil: Callable[[Single], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    single = Single(flux_runs, "flux", tmp_path)
    file, photos = spoil(single), ["--images", str(flux_runs.images), "--prompt", PROMPT]
    more = {
        "train": [*photos, "--output", str(tmp_path / "out"), "--data.full-resolution", "64"], "plan": [],
        "generate": ["--prompt", "x", "--output", str(tmp_path / "out")],
        "select": [*photos, "--output", str(tmp_path / "out.json")],
        "benchmark": ["--subjects-from", str(flux_runs.images.parent), "--output", str(tmp_path / "out")],
    }[verb]  # fmt: skip
    with Loads() as loads:
        code = main([verb, "--model", str(single.model), "--model.transformer", str(file), *more])
    out, err = capsys.readouterr()
    assert (code, out, loads.names) == (2, "", [])
    (line,) = err.splitlines()
    assert line.startswith(f'blockskip: model.transformer = "{file}" ')
    assert ("fetch it again" if spoil is damaged else "give a file of that model") in line
    assert not (tmp_path / "out.json").exists() and not list(tmp_path.glob("out/*.*"))


def test_a_single_file_as_the_model_says_how_it_is_used(
    flux_runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    single = Single(flux_runs, "flux", tmp_path)
    assert main(["generate", "--prompt", "x", "--model", str(single.original)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "is a single file: give the folder or hub id of its pipeline as --model" in line
    assert line.endswith("and the file as --model.transformer.")
