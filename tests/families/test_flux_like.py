"""What LongCat-Image, Ovis-Image and Bria have otherwise than FLUX.1: quoted text, positions, padding, times."""

import diffusers
import pytest
import torch
from diffusers.pipelines.longcat_image.pipeline_longcat_image import prepare_pos_ids

from blockskip.encoding.text import encode_prompts
from blockskip.loading.source import ModelSource
from tests.families.groups import CPU, forward_inputs, group
from tests.tiny_families import TINY

LENGTH = 40


@pytest.mark.parametrize("mark", ["'", '"', "“"])
def test_longcat_reads_quoted_text_letter_by_letter(longcat_image: ModelSource, mark: str) -> None:
    """As its pipeline does: a word in quotation marks is no token of its own."""
    pipeline = diffusers.LongCatImagePipeline.from_pretrained(longcat_image.folder, vae=None, scheduler=None)
    prompt = f"a sign that isn't {mark}user{'”' if mark == '“' else mark} here"
    (text,) = encode_prompts(longcat_image, [prompt], LENGTH, torch.float32, CPU)
    with torch.no_grad():
        expected = TINY["longcat_image"].pipeline_text(pipeline, [prompt], LENGTH)
    assert torch.equal(text["prompt_embeds"], expected["prompt_embeds"])
    tokenizer = longcat_image.load("tokenizer")
    found = [
        longcat_image.family.tokenize({"tokenizer": tokenizer}, [words], LENGTH)["mask"].sum()
        for words in (prompt, prompt.replace("user", "usre"), "user", "usre")
    ]
    assert found[0] == found[1]
    assert found[2] < found[3]  # without quotation marks the word is known


def test_longcat_s_image_is_placed_behind_its_text(longcat_image: ModelSource) -> None:
    inputs = forward_inputs(longcat_image, group(longcat_image))
    words = inputs["encoder_hidden_states"].shape[1]
    places = prepare_pos_ids(modality_id=1, type="image", start=(words, words), height=4, width=6)
    assert torch.equal(inputs["img_ids"], places)
    assert torch.equal(inputs["txt_ids"], prepare_pos_ids(num_token=words))


def test_longcat_s_guidance_makes_no_token_longer(longcat_image: ModelSource) -> None:
    family, one = longcat_image.family, torch.randn(1, 16, 4, 6)
    assert torch.allclose(family.guide(one, torch.zeros_like(one), 3.0), one)
    assert torch.allclose(family.guide(one, 1.2 * one, 3.0), 0.6 * one, atol=1e-6)  # shorter: as it is


def test_ovis_s_words_have_their_numbers(ovis_image: ModelSource) -> None:
    pipeline = diffusers.OvisImagePipeline.from_pretrained(ovis_image.folder, vae=None, scheduler=None)
    with torch.no_grad():
        _, _, words, _ = pipeline.encode_prompt("a dog", do_classifier_free_guidance=False, max_sequence_length=6)
    assert torch.equal(forward_inputs(ovis_image, group(ovis_image))["txt_ids"], words)


@pytest.mark.parametrize("name", ["ovis_image", "bria"])
def test_where_there_are_no_words_there_are_zeros(request: pytest.FixtureRequest, name: str) -> None:
    source: ModelSource = request.getfixturevalue(name)
    prompts = ["a dog", "a dog on the beach", ""]
    each = [text["prompt_embeds"][0] for text in encode_prompts(source, prompts, 2 * LENGTH, torch.float32, CPU)]
    counts = [int(text.any(dim=1).sum()) for text in each]
    assert counts[0] < counts[1] < 2 * LENGTH
    for text, count in zip(each, counts, strict=True):
        assert text[:count].any(dim=1).all()
    assert (counts[2] == 0) == (name == "bria")  # against which its pipeline guides


@pytest.mark.parametrize("dynamic", [False, True])
def test_bria_s_times_are_the_pipeline_s(bria: ModelSource, dynamic: bool) -> None:
    pipeline = diffusers.BriaPipeline.from_pretrained(bria.folder)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=dynamic)
    pipeline("a dog", 64, 96, 3, guidance_scale=1.0, max_sequence_length=8, output_type="latent")
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=dynamic)
    bria.family.set_timesteps(scheduler, 3, 8 * 12, CPU)
    assert torch.equal(scheduler.timesteps, pipeline.scheduler.timesteps)
    assert len(scheduler.timesteps) == 3
