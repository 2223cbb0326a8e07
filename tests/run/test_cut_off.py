"""With a folder or a built-in model no command asks for the network: no look-up, no check of a file, no telemetry."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from blockskip.builtin import MODELS
from tests.originals import write_original
from tests.tiny_families import ALIKE, NEAR, TINY

ROOT = Path(__file__).resolve().parent.parent.parent
FAMILIES = [name for name in TINY if name not in ALIKE | NEAR]
PROMPT = "a photo of sks dog"
#: What would keep the libraries from asking.
QUIET = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "DISABLE_TELEMETRY", "DO_NOT_TRACK")
SMALL = [
    "--train.steps", "1", "--train.gradient-accumulation-steps", "1", "--resolution", "32", "--data.full-resolution",
    "64", "--data.text-length", "12", "--rank", "2", "--preview.prompts", PROMPT, "--preview.num-inference-steps", "2",
    "--preview.height", "32", "--device", "cpu",
]  # fmt: skip
#: Models that are trained; the others, whose parts are loaded in the same way, are drawn with.
TRAINED = ("flux", "sana")
#: The one of them whose transformer comes from a single file, beside a folder without it.
SINGLE = "sana"


@pytest.fixture(scope="module")
def reports(
    request: pytest.FixtureRequest, photos: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """What each command did, by verb and model; also of a hub id and of telemetry, which do ask."""
    folder = tmp_path_factory.mktemp("cut-off")
    models = {name: str(request.getfixturevalue(f"{name}_folder")) for name in FAMILIES} | {
        name: name for name in MODELS
    }
    file = write_original(SINGLE, Path(models[SINGLE]), folder / "single.safetensors")
    bare = shutil.copytree(models[SINGLE], folder / "bare")
    (bare / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    plan: dict[str, list[str]] = {}
    for name, model in models.items():
        output, given = str(folder / name), ["--model", model]
        if name == SINGLE:
            given = ["--model", str(bare), "--model.transformer", str(file)]
            plan[f"plan {name}"] = ["plan", *given]
        if name in TRAINED:
            data = ["--images", str(photos), "--prompt", PROMPT, "--output", output]
            plan[f"train {name}"] = ["train", *given, *data, *SMALL]
            given = ["--lora", output]
        plan[f"generate {name}"] = [
            "generate", *given, "--prompt", PROMPT, "--height", "32", "--width", "32", "--num-inference-steps", "2",
            "--output", str(folder / "drawn" / name), "--device", "cpu",
        ]  # fmt: skip
    plan["hub"] = ["generate", "--model", "owner/name", "--prompt", PROMPT, "--output", str(folder / "hub")]
    (folder / "plan.json").write_text(json.dumps([*plan.values()]), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name not in QUIET}
    environment |= {"BLOCKSKIP_CACHE": str(folder / "hashes"), "HF_HOME": str(folder / "home")}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    command = [sys.executable, "-m", "tests.run.cut_off", str(folder / "plan.json"), str(folder / "report.json")]
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=600)
    found = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return dict(zip([*plan, "telemetry"], found, strict=True))


@pytest.mark.parametrize("name", [*FAMILIES, *MODELS])
def test_a_local_model_is_used_without_asking(reports: dict[str, Any], name: str) -> None:
    used = {command: report for command, report in reports.items() if command.split()[1:] == [name]}
    assert used.keys() == {
        f"{verb} {name}" for verb in ("plan", "train", "generate")[(name != SINGLE) + (name not in TRAINED) :]
    }
    for report in used.values():
        assert report["status"] == 0, report["printed"]
        assert report["asked"] == []


def test_asking_would_have_been_noticed(reports: dict[str, Any]) -> None:
    assert reports["hub"]["asked"]
    assert reports["hub"]["status"] == 2
    assert reports["telemetry"]["asked"]
