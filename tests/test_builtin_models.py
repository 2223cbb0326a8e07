"""The built-in pipelines are plain diffusers folders, and the package draws with them what diffusers draws."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from diffusers import AutoencoderDC, AutoencoderKL

import blockskip
from blockskip import builtin
from blockskip.loading.source import open_model

PROMPTS = ["a photo of a dog on the beach", "a flat drawing of a small apple on the left in the snow"]
SCRIPT = """
import json, sys
import numpy as np, torch
from diffusers import {pipeline}
torch.set_num_threads(1)
pipeline = {pipeline}.from_pretrained(sys.argv[1])
pipeline.set_progress_bar_config(disable=True)
call = json.load(open(sys.argv[1] + "/builtin.json"))["call"] | {{"num_inference_steps": 4}}
pictures = [
    np.asarray(pipeline(prompt, generator=torch.Generator().manual_seed(5), **call).images[0]) for prompt in {prompts}
]
np.save(sys.argv[2], np.stack(pictures))
assert not any(name.split(".")[0] == "blockskip" for name in sys.modules)
"""


@pytest.mark.parametrize(
    ("name", "pipeline", "tolerance"),
    [("builtin", "FluxPipeline", 0), ("builtin-sana", "SanaPipeline", 1)],  # SANA's stacks both halves of the guidance
)
def test_diffusers_alone_draws_what_generate_draws(name: str, pipeline: str, tolerance: int, tmp_path: Path) -> None:
    out = tmp_path / "pictures.npy"
    script = SCRIPT.format(pipeline=pipeline, prompts=PROMPTS)
    subprocess.run(
        [sys.executable, "-c", script, str(builtin.model_path(name)), str(out)], check=True, capture_output=True
    )
    ours = blockskip.generate(PROMPTS, model=name, seed=5, num_inference_steps=4, dtype="float32")
    found = np.stack([np.asarray(picture) for picture in ours])
    difference = np.abs(found.astype(int) - np.load(out))
    assert difference.max() <= tolerance and (difference > 0).mean() < 0.01
    assert found.shape == (2, 64, 64, 3) and found.std(axis=(1, 2)).min() > 1  # a picture, not a plain colour
    other = blockskip.generate(PROMPTS[:1], model=name, seed=6, num_inference_steps=4, dtype="float32")
    assert np.abs(np.asarray(other[0]).astype(int) - found[0]).mean() > 5


@pytest.mark.parametrize(("name", "autoencoder"), [("builtin", AutoencoderKL), ("builtin-sana", AutoencoderDC)])
def test_a_built_in_model_says_what_it_knows(name: str, autoencoder: type) -> None:
    source = open_model(name)
    known = json.loads((source.folder / "builtin.json").read_text(encoding="utf-8"))
    assert len(known["objects"]) >= 60 and len(known["backgrounds"]) >= 12 and len(known["styles"]) >= 2
    assert known["trained"].keys() == {"steps", "pictures", "minutes"}
    assert source.pixel_stride == 8 and source.full_resolution == 128 and source.text_length == 32
    assert type(source.load("vae")) is autoencoder
    for which in ("development", "test"):
        assert not set(builtin.subjects(which)) & set(known["objects"])


@pytest.mark.parametrize("name", builtin.MODELS)
def test_no_config_names_a_place_of_the_machine_that_made_it(name: str) -> None:
    for path in Path(builtin.model_path(name)).rglob("*.json"):
        assert "_name_or_path" not in path.read_text(encoding="utf-8"), path


def test_the_built_in_models_are_small() -> None:
    folders = [builtin.model_path(name) for name in builtin.MODELS]
    size = sum(file.stat().st_size for folder in folders for file in folder.rglob("*") if file.is_file())
    assert size <= 100e6
