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
from blockskip.preview.draw import Drawing, decode, draw
from tests.families.groups import CPU
from tests.tiny_families import ALIKE, TINY

PROMPTS = ("a photo of sks dog", "A cat")
SIZE = {"height": 64, "width": 96, "steps": 3, "text_length": 24}
#: Without guidance a step is held to the pipeline's by the tests of the families.
CASES = ["flux", "sana", *(f"{name} cfg" for name in TINY), "guided", "sd3_bare cfg"]


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


@pytest.mark.parametrize("case", CASES)
def test_a_picture_is_the_pipeline_s_own(request: pytest.FixtureRequest, case: str) -> None:
    name, _, cfg = case.partition(" ")
    source: ModelSource = request.getfixturevalue(name)
    tiny = TINY[source.family.name]
    lacked: set[str] = set().union(*source.family.text_parts) - set().union(*source.text_parts)
    cls = getattr(diffusers, source.family.pipeline_class)
    pipeline = cls.from_pretrained(source.folder, **dict.fromkeys(lacked))
    pipeline.set_progress_bar_config(disable=True)
    tiny.ready(pipeline)
    wanted = 3.0 if cfg else 2.5 if case == "guided" else 1.0
    options = dict(tiny.guided) if cfg else {"guidance_scale": 2.5} if case == "guided" else {}
    rows = drawn(source, seeds=(7, 8), guidance_scale=wanted)
    assert same(drawn(source, seeds=(7, 8), guidance_scale=wanted, stream=True), rows)

    def expected(prompt: str, seed: int, options: dict[str, Any]) -> np.ndarray[Any, Any]:
        image = pipeline(
            prompt=prompt, height=64, width=96, num_inference_steps=3, generator=torch.Generator().manual_seed(seed),
            **(dict(tiny.plain) | options | tiny.length(pipeline, 24)),
        ).images[0]  # fmt: skip
        return np.asarray(image).astype(int)

    for prompt, row in zip(PROMPTS, rows, strict=True):
        for seed, image in zip((7, 8), row, strict=True):
            assert image.shape == (64, 96, 3)
            difference = np.abs(image - expected(prompt, seed, options)).max()
            assert difference <= (tiny.rounding if cfg else 0)
    assert np.abs(rows[0][0] - rows[0][1]).mean() > 3
    assert np.abs(rows[0][0] - rows[1][0]).max() > 3
    if options:
        plain = {"guidance_scale": 1.0} if case == "guided" else {}
        assert np.abs(rows[0][0] - expected(PROMPTS[0], 7, plain)).max() > 3


@pytest.mark.parametrize("source", ["flux", "sana"], indirect=True)
def test_a_picture_does_not_depend_on_the_others(source: ModelSource) -> None:
    both = drawn(source, seeds=(1, 2), guidance_scale=3.0)
    torch.manual_seed(99)
    alone = drawn(source, prompts=PROMPTS[1:], seeds=(2,), guidance_scale=3.0)
    assert np.array_equal(alone[0][0], both[1][1])
    batched = drawn(source, seeds=(1, 2), guidance_scale=3.0, batch_size=3)
    for one, other in zip(both, batched, strict=True):
        for a, b in zip(one, other, strict=True):
            assert np.abs(a - b).max() <= 1


def test_noise_that_a_sampler_draws_depends_on_the_seed_alone(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """HiDream's distilled models are published with a scheduler that draws noise in every step."""
    shutil.copytree(request.getfixturevalue("hidream").folder, tmp_path / "model")
    diffusers.FlowMatchLCMScheduler(shift=6.0).save_pretrained(tmp_path / "model" / "scheduler")
    index = tmp_path / "model" / "model_index.json"
    known = json.loads(index.read_text(encoding="utf-8"))
    index.write_text(json.dumps(known | {"scheduler": ["diffusers", "FlowMatchLCMScheduler"]}), encoding="utf-8")
    source = open_model(str(tmp_path / "model"))
    (first, second), _ = drawn(source, seeds=(3, 4), guidance_scale=1.0)
    torch.manual_seed(99)
    (other, again), _ = drawn(source, seeds=(4, 3), guidance_scale=1.0, batch_size=1)
    assert np.abs(first - second).mean() > 3
    assert np.abs(first - again).max() <= 1 and np.abs(second - other).max() <= 1
    rows = draw(source, Drawing(PROMPTS[:1], (3,), 64, 96, 3, 1.0, 24), encode, torch.float32, CPU, None, ((), ()))
    assert rows[0][0].tobytes() == rows[0][1].tobytes()


@pytest.mark.parametrize("source", ["flux", "sana"], indirect=True)
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


@pytest.mark.parametrize("name", [name for name in TINY if name not in ALIKE])
def test_a_picture_takes_one_step_where_the_sampler_can(request: pytest.FixtureRequest, name: str) -> None:
    """Qwen-Image's cannot: its pipeline divides zero by zero, and gives a picture that is black. So it is refused."""
    source: ModelSource = request.getfixturevalue(name)
    if name != "qwen_image":
        assert drawn(source, prompts=PROMPTS[:1], steps=1)[0][0].std() > 3
        return
    with pytest.raises(UserError, match=r"^num_inference_steps = 1 is too few for this model's sampler; take 2 or"):
        Drawing((), steps=1).check(source)
    with pytest.raises(UserError, match=r"^--num-inference-steps = 1 is too few"):
        Drawing((), steps=1).check(source, "--")
    assert Drawing((), height=64, width=96, steps=2).check(source) == (64, 96)


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


@pytest.mark.parametrize("name", ["flux", "sana", "sd3"])
def test_guidance_is_an_extrapolation(request: pytest.FixtureRequest, name: str) -> None:
    family = request.getfixturevalue(name).family
    c, u = torch.randn(2, 4, 2, 4), torch.randn(2, 4, 2, 4)
    assert torch.allclose(family.guide(c, u, 1.0), c)
    assert torch.allclose(family.guide(c, u, 3.0), u + 3 * (c - u))


def test_qwen_s_guidance_keeps_the_length_of_every_token(qwen_image: ModelSource) -> None:
    c, u = torch.randn(2, 4, 4, 6), torch.randn(2, 4, 4, 6)
    guided = qwen_image.family.guide(c, u, 3.0)
    tokens = [
        value.unfold(2, 2, 2).unfold(3, 2, 2).transpose(1, 3).flatten(3) for value in (guided, c, u + 3 * (c - u))
    ]
    lengths = [value.norm(dim=-1) for value in tokens]
    assert torch.allclose(lengths[0], lengths[1])
    assert not torch.allclose(lengths[1], lengths[2], rtol=0.1)
    assert torch.allclose(torch.nn.functional.cosine_similarity(tokens[0], tokens[2], dim=-1), torch.ones(2, 3, 2))
