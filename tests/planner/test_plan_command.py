"""The verb ``plan``: what it prints, what it refuses, and that it leaves everything but its cache alone."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

import blockskip
from blockskip.cli import main
from blockskip.method.split import Split
from blockskip.planner import PHASES, timing
from blockskip.planner.counting import DEVICE_ROLES
from blockskip.presets import unmeasured
from blockskip.settings import leaves
from tests.tiny_families import NEAR, TINY

SMALL = ["--resolution", "32", "--data.full-resolution", "64", "--rank", "2", "--steps", "3"]
PREVIEW = ["--preview.prompts", "a dog", "--preview.height", "64", "--preview.width", "64"]


def planned(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    document: dict[str, Any] = json.loads(out)
    return document


def consistent(document: dict[str, Any]) -> None:
    """The keys are those of every plan, and the parts make the wholes."""
    phases = document["phases"]
    assert tuple(phases) == PHASES
    keys = {"device_peak_bytes", "device", "host_peak_bytes", "host", "disk_bytes", "read_bytes", "flops",
            "flops_forward", "flops_backward", "used", "seconds"}  # fmt: skip
    for name, phase in phases.items():
        assert set(phase) == keys, name
        if phase["used"]:
            assert set(phase["device"]) == set(DEVICE_ROLES), name
            assert sum(phase["device"].values()) == phase["device_peak_bytes"], name
            assert phase["flops"] == phase["flops_forward"] + phase["flops_backward"], name
    used = [phase for phase in phases.values() if phase["used"]]
    for key in ("device_peak_bytes", "host_peak_bytes"):
        assert document[key] == max(phase[key] for phase in used)
    assert document["disk_bytes"] == sum(phase["disk_bytes"] for phase in used)
    train = phases["train"]["device"]
    assert train["adapters"] >= train["gradients"] > 0  # some of SD3's LoRA layers never get a gradient
    assert train["optimizer"] >= 2 * train["gradients"]


@pytest.mark.parametrize("family", [name for name in TINY if name not in NEAR])
def test_json_of_every_family(
    family: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without pictures, output folder or network."""

    def refused(*_: object) -> None:
        raise AssertionError("a plan of a local folder asks nobody")

    monkeypatch.setattr(socket.socket, "connect", refused)
    folder = request.getfixturevalue(f"{family}_folder")
    document = planned(["--model", str(folder), *SMALL, *PREVIEW], capsys)
    consistent(document)
    assert all(phase["used"] for phase in document["phases"].values())
    assert document["model"] == str(folder)
    assert document["settings"]["model.path"] == str(folder)


def test_a_plan_writes_into_its_cache_only_and_is_remembered(
    flux_folder: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    work, cache = tmp_path / "work", tmp_path / "cache"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("BLOCKSKIP_CACHE", str(cache))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    options = ["--model", str(flux_folder), "--images", str(photos), "--output", "out", *SMALL]
    fresh = planned(options, capsys)
    (plan,) = cache.glob("plans/*.json")
    marked = plan.stat().st_mtime_ns
    assert planned(options, capsys) == fresh
    assert plan.stat().st_mtime_ns == marked
    other = planned([*options, "--lora.rank", "4"], capsys)
    assert other["phases"]["train"]["device"]["adapters"] == 2 * fresh["phases"]["train"]["device"]["adapters"]
    assert len(list(cache.glob("plans/*.json"))) == 2
    assert list(work.iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} == {"work", "cache"}
    again = blockskip.plan(model=flux_folder, images=photos, output="out", resolution=32, data__full_resolution=64,
                           rank=2, steps=3)  # fmt: skip
    assert json.loads(json.dumps(again.as_json())) == fresh


def test_pictures_say_captions_and_sizes(flux_folder: Path, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", str(flux_folder), *SMALL]
    without = planned(options, capsys)
    given = [*options, "--images", str(photos), "--prompt", "a photo of sks dog", "--data.caption-dropout", "0.1"]
    assert planned(given, capsys)["phases"]["train"] == without["phases"]["train"]
    doubled = planned([*given, "--data.class-images", str(photos), "--data.class-prompt", "a dog"], capsys)
    assert doubled["phases"]["encode pictures"]["disk_bytes"] == 2 * without["phases"]["encode pictures"]["disk_bytes"]
    assert doubled["settings"]["train.batch_size"] == 1


def test_the_published_model_is_planned_offline(capsys: pytest.CaptureFixture[str]) -> None:
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    options = ["--model", "black-forest-labs/FLUX.1-dev", "--resolution", "256", "--skip", "0.5", "--device", "cuda"]
    document = planned(options, capsys)
    consistent(document)
    assert (document["device"], document["dtype"], document["split"], document["num_blocks"]) == (
        "cuda", "bfloat16", [19, 10], 57,
    )  # fmt: skip
    middle, whole = (document["phases"][name]["device"]["weights"] for name in ("train", "preview"))
    assert 0.3 < middle / whole < 0.4
    assert str(Path(blockskip.__file__).parent) not in json.dumps(document)


def test_device_and_dtype_are_told(flux_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for device, shown in (("cuda", "on cuda in bfloat16"), ("cpu", "on cpu in float32"), ("cuda:3", "on cuda")):
        assert main(["plan", "--model", str(flux_folder), "--device", device, *SMALL]) == 0
        out = capsys.readouterr().out
        assert shown in " ".join(out.split())
        assert ("one memory" in out) == (device == "cpu")


def test_a_bare_config_is_enough(flux_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The text encoders are a published model's, whose width the tiny transformer does not have: a real config does."""
    import blockskip.planner as planner

    folder = Path(planner.__file__).parent / "models" / "stabilityai--stable-diffusion-3-medium-diffusers"
    document = planned(["--model", str(folder / "transformer" / "config.json"), "--resolution", "256"], capsys)
    consistent(document)
    assert any("assumed" in remark for remark in document["remarks"])


def test_a_comparison_is_a_table_json_and_a_chart(
    flux_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["plan", "--model", str(flux_folder), *SMALL, "--compare"]
    assert main([*options, "--skip.front", "5", "--skip.tail", "1", "--chart", str(tmp_path / "chart.png")]) == 0
    out = capsys.readouterr().out
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    for shown in ("plain LoRA", "skip 30%", "skip 40%", "skip 50%", "yours: ", "64 px", "32 px", "1.00"):
        assert shown in out
    assert main([*options, "--skip", "0.5", "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert len(plans) == 5
    peaks = [plan["phases"]["train"]["device_peak_bytes"] for plan in plans.values()]
    assert peaks == sorted(peaks, reverse=True)
    for plan in plans.values():
        consistent(plan)
    assert not next(iter(plans.values()))["phases"]["precompute"]["used"]


def test_a_comparison_says_what_its_plans_share_and_tells_none_twice(
    flux_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["plan", "--model", str(flux_folder), "--resolution", "32", "--data.full-resolution", "32", "--compare"]
    assert main([*options, "--train.gradient-checkpointing", "--train.stream-middle", "--skip.front", "5"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "bfloat16, with gradient checkpointing, LoRA" in out
    assert "yours, streamed" in out
    assert out.count("plain LoRA") == 3, "the heading, one column, the note"
    assert main([*options, "--model.quantization", "nf4", "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert [name for name in plans if name.startswith("plain")] == ["plain LoRA, 32 px"]
    assert main([*options, "--model.quantization", "nf4"]) == 0
    assert "trained blocks in nf4, LoRA" in " ".join(capsys.readouterr().out.split())


def test_a_budget_that_takes_captions_to_be_short_says_so_once(
    flux_folder: Path, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the plan itself, where it knows no pictures; not where it does, and not without a budget."""
    options = ["--model", str(flux_folder), *SMALL]
    sentence = "Text is cut to {} tokens: without pictures, captions are taken to be that short."
    whole = planned(options, capsys)
    length = whole["settings"]["data.text_length"]
    assert length > 128, "or nothing is cut"
    held = ["--skip", "0.5", "--train.gradient-checkpointing", "--no-model.stream-text-encoders"]
    most = planned([*options, *held, "--data.text-length", "256"], capsys)["device_peak_bytes"]
    budget = [*options, *held, "--memory", f"{most}B"]
    assert main(["plan", *budget]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert out.count(sentence.format(256)) == 1
    assert main(["plan", *budget, "--images", str(photos), "--prompt", "a dog"]) == 0
    assert "captions are taken" not in capsys.readouterr().out
    assert not any("captions are taken" in remark for remark in whole["remarks"])


def test_a_split_that_nobody_measured_is_told(flux_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the words of a run, in the text, in JSON and of a comparison; a split that was given needs no warning."""
    model = ["--model", str(flux_folder), *SMALL]
    sentence = unmeasured(Split(3, 1))
    assert "`blockskip select`" in sentence
    document = planned([*model, "--skip", "0.5"], capsys)
    assert document["split"] == [3, 1] and document["remarks"].count(sentence) == 1
    assert main(["plan", *model, "--skip", "0.5"]) == 0
    assert sentence in " ".join(capsys.readouterr().out.split())
    assert main(["plan", *model, "--skip", "0.5", "--compare"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert sentence in out and unmeasured(Split(1, 1)) in out
    for given in (["--skip", "0"], ["--skip.front", "3", "--skip.tail", "1"]):
        assert not any("Nobody has measured" in remark for remark in planned([*model, *given], capsys)["remarks"])


def test_seconds_follow_the_counted_work(flux_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = planned(["--model", str(flux_folder), *SMALL, "--measure"], capsys)
    phases = document["phases"]
    assert phases["precompute"]["seconds"] > 0
    assert phases["train"]["seconds"] > 0
    assert phases["encode text"]["seconds"] is None
    assert any("estimates" in remark for remark in document["remarks"])
    speed = timing.Speed(100.0, 50.0, "cpu", "float32")
    plan = timing.timed(blockskip.plan(model=flux_folder, resolution=32, data__full_resolution=64), speed)
    assert plan.phases["precompute"].seconds == plan.phases["precompute"].flops / 100
    assert plan.phases["train"].seconds == plan.phases["train"].flops / 50
    assert plan.phases["preview"].seconds == plan.phases["preview"].flops / 100, "of one picture, where none is drawn"


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["--model", "someone/unknown"], ["someone/unknown", "cannot be fetched", "HF_HUB_OFFLINE"]),
        (["--model", "nowhere"], ['model.path = "nowhere"']),
        (["--resolution", "36"], ["data.resolution = 36", "stride 8"]),
        (["--resolution", "72", "--data.full-resolution", "64"], ["data.resolution = 72", "larger", "64"]),
        (["--skip", "0.95"], ["0.95", "no block"]),
        (["--model.dtype", "float15"], ['model.dtype = "float15"', "bfloat16"]),
        (["--model.dtype", "float16"], ['model.dtype = "float16"', "too narrow"]),
        (["--device", "tpu"], ['train.device = "tpu"', "cuda"]),
        (["--images", "nowhere"], ['data.images = "nowhere" does not exist']),
        (["--features.window", "lots"], ['features.window = "lots" is not a size']),
        (["--lora.targets", "to_qq"], ["lora.targets", "to_qq"]),
        (["--chart", "chart.png"], ["--chart", "--compare"]),
        (["--compare", "--chart", "chart.doc"], ["chart.doc", ".png"]),
        (["--mesure"], ["--mesure", "--measure"]),
        (["--config", "run.toml"], ['"train.learning_rte"', '"train.learning_rate"']),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: list[str], fragments: list[str], flux_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text("[train]\nlearning_rte = 1\n", encoding="utf-8")
    model = [] if "--model" in arguments else ["--model", str(flux_folder)]
    assert main(["plan", *model, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert all(line.startswith("blockskip: ") and line.endswith(".") for line in lines), err
    assert len(lines) == (2 if "someone/unknown" in arguments else 1)  # and the models that are built in
    for fragment in fragments:
        assert fragment in lines[0]


def test_help_is_readable(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as caught:
        main(["plan", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for name in ("json", "compare", "chart", "measure", "config", *(name.replace("_", "-") for name in leaves())):
        assert f"--{name}" in text
    assert "SUPPRESS" not in text
    assert max(map(len, text.splitlines())) <= 120


def test_a_refused_budget_names_what_was_given_and_where(
    flux_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not what follows from it, and not what a preset says as the user's own."""
    file = tmp_path / "run.toml"
    file.write_text("[train]\ngradient_checkpointing = false\n[skip]\nfront = 2\n", encoding="utf-8")
    options = ["--preset", "flux/24gb", "--config", str(file), "--model", str(flux_folder), "--memory", "100KiB"]
    options += ["--resolution", "32", "--data.full-resolution", "64", "--skip.tail", "1"]
    assert main(["plan", *options, "--features.disk", "1GiB", "--disk", "1KiB", "--no-train.stream-middle"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    told = [line for line in err.splitlines() if "stand in the way" in line]
    assert told == [
        "blockskip: These settings of yours were left as they are and stand in the way: features.disk, skip.tail, "
        "train.stream_middle.",
        f'blockskip: These settings in "{file}" were left as they are and stand in the way: '
        "train.gradient_checkpointing, skip.front.",
        "blockskip: These settings of the preset flux/24gb, which options override, were left as they are and stand in "
        "the way: data.text_length.",
    ]


def test_a_size_without_a_unit_is_no_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Eight of what? And a number in a config file is one sentence too."""
    assert main(["plan", "--model", "builtin", "--memory", "8"]) == 2
    assert 'memory.device = "8" has no unit; write for example "512MiB" or "8GiB".' in capsys.readouterr().err
    (tmp_path / "config.toml").write_text("[memory]\ndevice = 8\n", encoding="utf-8")
    assert main(["plan", "--model", "builtin", "--config", str(tmp_path / "config.toml")]) == 2
    assert "memory.device must be a text, not 8." in capsys.readouterr().err
