"""The whole way of every family: from photos and captions of any length to an adapter that the pipeline uses."""

import shutil
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from blockskip.loading.source import ModelSource
from tests.run.runs import Runs
from tests.tiny_families import TINY

CAPTIONS = {"1": "dog", "2": "a photo of sks dog on the grass, seen from above", "4": ""}


@pytest.mark.filterwarnings("ignore:The caption")
@pytest.mark.parametrize("name", [*TINY, "sd3_bare"])
def test_a_run_ends_in_an_adapter_that_the_pipeline_draws_with(
    request: pytest.FixtureRequest, photos: Path, tmp_path: Path, name: str
) -> None:
    source: ModelSource = request.getfixturevalue(name)
    images = shutil.copytree(photos, tmp_path / "photos")
    for stem, text in CAPTIONS.items():
        (images / f"{stem}.txt").write_text(text, encoding="utf-8")
    size = {"preview__height": 64, "preview__width": 96, "preview__num_inference_steps": 2}
    run = Runs(tmp_path / "runs", source.folder, images)(
        train__batch_size=2, train__steps=3, data__text_length=40, preview__prompts=["a dog"], skip__ratio=0.5,
        preview__guidance_scale=3.0, **size,
    )  # fmt: skip
    assert all(np.isfinite(entry["loss"]) for entry in run.entries)
    (preview,) = sorted((run.output / "samples").rglob("*.png"))
    drawn = np.asarray(Image.open(preview)).astype(int)
    assert drawn.shape == (64, 96, 3)

    tiny = TINY[source.family.name]
    lacked: set[str] = set().union(*source.family.text_parts) - set().union(*source.text_parts)
    pipeline: Any = getattr(diffusers, source.family.pipeline_class).from_pretrained(
        source.folder, **dict.fromkeys(lacked)
    )
    pipeline.set_progress_bar_config(disable=True)
    tiny.ready(pipeline)

    def picture() -> Any:
        image = pipeline(
            prompt="a dog", height=64, width=96, num_inference_steps=2, generator=torch.Generator().manual_seed(0),
            **(dict(tiny.plain) | dict(tiny.guided) | tiny.length(pipeline, 40)),
        ).images[0]  # fmt: skip
        return np.asarray(image).astype(int)

    base = picture()
    tiny.load_lora(pipeline, run.output / "adapter")
    assert np.abs(picture() - drawn).max() <= max(1, tiny.rounding)
    assert np.abs(base - drawn).max() > 3
