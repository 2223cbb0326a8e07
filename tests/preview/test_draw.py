"""Drawn pictures are the pipeline's own, streamed or not, and depend on their seed alone."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from blockskip.encoding.text import encode_prompts
from blockskip.errors import RunError, UserError
from blockskip.families import Text
from blockskip.loading.source import ModelSource, open_model
from blockskip.preview.denoise import guided_velocity
from blockskip.preview.draw import Drawing, decode, draw
from tests.families.groups import CPU

PROMPTS = ("a photo of sks dog", "A cat")
SIZE = {"height": 64, "width": 96, "steps": 3, "text_length": 24}
OPTIONS = {
    "flux": {}, "flux cfg": {"true_cfg_scale": 3.0, "negative_prompt": ""}, "guided": {"guidance_scale": 2.5},
    "sana": {"guidance_scale": 1.0}, "sana cfg": {"guidance_scale": 4.5},
}  # fmt: skip
WANTED = {"flux": 1.0, "flux cfg": 3.0, "guided": 2.5, "sana": 1.0, "sana cfg": 4.5}


_encoded: dict[tuple[str, str, int, torch.dtype], Text] = {}


def encode(
    source: ModelSource, prompts: Sequence[str], length: int, dtype: torch.dtype, device: torch.device
) -> list[Text]:
    """`encode_prompts`, each prompt once in all tests of this file."""
    keys = [(source.name, prompt, length, dtype) for prompt in prompts]
    missing = [key for key in dict.fromkeys(keys) if key not in _encoded]
    if missing:
        texts = encode_prompts(source, [key[1] for key in missing], length, dtype, device)
        _encoded.update(zip(missing, texts, strict=True))
    return [_encoded[key] for key in keys]


def drawn(source: ModelSource, dtype: torch.dtype = torch.float32, **options: Any) -> list[list[np.ndarray[Any, Any]]]:
    drawing = Drawing(**({"prompts": PROMPTS} | SIZE | options))
    rows = draw(source, drawing, encode, dtype, CPU)
    return [[np.asarray(image).astype(int) for image in row] for row in rows]


def same(one: list[list[np.ndarray[Any, Any]]], other: list[list[np.ndarray[Any, Any]]]) -> bool:
    return all(np.array_equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("case", OPTIONS)
def test_a_picture_is_the_pipeline_s_own(request: pytest.FixtureRequest, case: str) -> None:
    source: ModelSource = request.getfixturevalue(case.partition(" ")[0])
    pipeline = getattr(diffusers, source.family.pipeline_class).from_pretrained(source.folder)
    pipeline.set_progress_bar_config(disable=True)
    rows = drawn(source, seeds=(7, 8), guidance_scale=WANTED[case])
    assert same(drawn(source, seeds=(7, 8), guidance_scale=WANTED[case], stream=True), rows)
    sana = {"complex_human_instruction": None, "use_resolution_binning": False} if "sana" in case else {}

    def expected(prompt: str, seed: int, **options: Any) -> np.ndarray[Any, Any]:
        image = pipeline(
            prompt, height=64, width=96, num_inference_steps=3, max_sequence_length=24,
            generator=torch.Generator().manual_seed(seed), **sana, **options,
        ).images[0]  # fmt: skip
        return np.asarray(image).astype(int)

    for prompt, row in zip(PROMPTS, rows, strict=True):
        for seed, image in zip((7, 8), row, strict=True):
            assert image.shape == (64, 96, 3)
            difference = np.abs(image - expected(prompt, seed, **OPTIONS[case])).max()
            assert difference <= (1 if case == "sana cfg" else 0)  # that pipeline stacks both halves of the guidance
    assert np.abs(rows[0][0] - rows[0][1]).mean() > 3
    assert np.abs(rows[0][0] - rows[1][0]).max() > 3
    if case in ("flux cfg", "guided", "sana cfg"):
        assert np.abs(rows[0][0] - expected(PROMPTS[0], 7, guidance_scale=1.0)).max() > 3


def test_a_picture_does_not_depend_on_the_others(source: ModelSource) -> None:
    both = drawn(source, seeds=(1, 2), guidance_scale=3.0)
    torch.manual_seed(99)
    alone = drawn(source, prompts=PROMPTS[1:], seeds=(2,), guidance_scale=3.0)
    assert np.array_equal(alone[0][0], both[1][1])
    batched = drawn(source, seeds=(1, 2), guidance_scale=3.0, batch_size=3)
    for one, other in zip(both, batched, strict=True):
        for a, b in zip(one, other, strict=True):
            assert np.abs(a - b).max() <= 1


def test_bfloat16_draws_nearly_the_same(source: ModelSource) -> None:
    full, half = drawn(source, guidance_scale=2.0), drawn(source, torch.bfloat16, guidance_scale=2.0)
    for right, wrong in ((0, 1), (1, 0)):
        distance = np.abs(full[right][0] - half[right][0]).mean()
        assert 3 * distance < np.abs(full[right][0] - half[wrong][0]).mean()
    assert same(drawn(source, torch.bfloat16, guidance_scale=2.0, stream=True), half)


def test_the_model_s_own_call_fills_what_is_left_open(flux_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(flux_folder, tmp_path / "model")
    call = {"height": 64, "width": 96, "num_inference_steps": 3, "max_sequence_length": 24, "true_cfg_scale": 3.0,
            "negative_prompt": "blurry"}  # fmt: skip
    (folder / "builtin.json").write_text(json.dumps({"full_resolution": 128, "call": call}), encoding="utf-8")
    rows = draw(open_model(str(folder)), Drawing(PROMPTS), encode_prompts, torch.float32, CPU)
    pipeline = diffusers.FluxPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    expected = pipeline(PROMPTS[1], generator=torch.Generator().manual_seed(0), **call).images[0]
    assert np.array_equal(np.asarray(rows[1][0]), np.asarray(expected))


def test_without_such_a_call_the_size_is_the_family_s(flux: ModelSource) -> None:
    assert Drawing(()).size(flux) == (512, 512)
    assert Drawing((), height=64).size(flux) == (64, 512)


def test_a_size_that_is_no_multiple_of_the_stride_is_told(flux: ModelSource) -> None:
    with pytest.raises(UserError, match=r"^width = 99 is no multiple of 8; take 96"):
        drawn(flux, width=99)


def test_a_decoder_that_gives_no_numbers_is_told_and_draws_nothing(
    flux: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    nan = lambda *_: torch.full((1, 3, 8, 8), float("nan"))  # noqa: E731
    monkeypatch.setattr(type(flux.family), "decode", nan)
    with pytest.raises(RunError, match="not finite"):
        decode(flux, [torch.zeros(1, 4, 8, 8)], torch.float32, CPU)


def test_float16_is_decoded_in_float32(flux: ModelSource) -> None:
    latents = torch.randn(1, 4, 16, 24)
    half, full = (decode(flux, [latents.to(dtype)], dtype, CPU)[0] for dtype in (torch.float16, torch.float32))
    assert isinstance(half, Image.Image)
    assert np.abs(np.asarray(half).astype(int) - np.asarray(full).astype(int)).max() <= 2


def test_guidance_is_an_extrapolation() -> None:
    c, u = torch.randn(2, 3), torch.randn(2, 3)
    assert guided_velocity(c, None, 7.0) is c
    assert torch.allclose(guided_velocity(c, u, 1.0), c)
    assert torch.allclose(guided_velocity(c, u, 3.0), u + 3 * (c - u))
