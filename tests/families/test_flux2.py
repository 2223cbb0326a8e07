"""What FLUX.2 alone has: statistics of latents, a processor in the place of a tokenizer, distilled models, guidance."""

import json
import shutil
from pathlib import Path

import diffusers
import pytest
import torch

from blockskip.loading.source import ModelSource, open_model
from tests.families.groups import distance, forward_inputs, group
from tests.tiny_families.flux2 import make_klein


def test_latents_are_normalised_as_the_pipeline_does_it(flux2: ModelSource) -> None:
    """A scale that encode and decode share would pass unseen by their round trip."""
    pipeline = diffusers.Flux2Pipeline.from_pretrained(flux2.folder)
    pixels, noise = torch.rand(1, 3, 32, 48) * 2 - 1, torch.randn(1, 16, 4, 6)
    with torch.no_grad():
        expected = pipeline._encode_vae_image(pixels, torch.Generator())
        found = flux2.family.encode_pixels(pipeline.vae, pixels, noise)
    assert distance(found, expected) < 1e-6


def test_latents_and_places_are_those_of_the_pipeline(flux2: ModelSource) -> None:
    batch = group(flux2)
    inputs, noisy = forward_inputs(flux2, batch), flux2.family.add_noise(batch.latents, batch.noise, batch.sigma)
    assert torch.equal(inputs["hidden_states"], diffusers.Flux2Pipeline._pack_latents(noisy))
    assert torch.equal(inputs["img_ids"], diffusers.Flux2Pipeline._prepare_latent_ids(noisy)[0].float())
    words = diffusers.Flux2Pipeline._prepare_text_ids(batch.text["prompt_embeds"])
    assert torch.equal(inputs["txt_ids"], words[0].float())
    assert torch.equal(flux2.family.velocity(inputs["hidden_states"], batch.latents), noisy)


def test_guidance_is_an_input_of_dev_and_not_of_klein(flux2: ModelSource, flux2_klein: ModelSource) -> None:
    assert forward_inputs(flux2, group(flux2))["guidance"].tolist() == [3.5, 3.5]
    assert forward_inputs(flux2_klein, group(flux2_klein))["guidance"] is None
    for source, expected in ((flux2, (2.5, 1.0)), (flux2_klein, (1.0, 2.5))):
        assert source.family.preview_guidance(source.config("transformer"), {}, 2.5) == expected


@pytest.mark.parametrize("distilled", [True, False])
def test_a_distilled_klein_draws_in_four_steps_without_guidance(tmp_path: Path, distilled: bool) -> None:
    source = open_model(str(make_klein(tmp_path, distilled=distilled)))
    call = source.settings["call"]
    assert source.family.preview_guidance(source.config("transformer"), call, None) == (1.0, 1.0 if distilled else 4.0)
    assert call.get("num_inference_steps") == (4 if distilled else None)


def test_of_a_processor_the_tokenizer_is_enough(flux2: ModelSource, tmp_path: Path) -> None:
    """The published pipeline has a PixtralProcessor, which cannot be made without packages for pictures."""
    folder = shutil.copytree(flux2.folder, tmp_path / "model")
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    index["tokenizer"] = ["transformers", "PixtralProcessor"]
    (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    found = [
        source.family.tokenize({"tokenizer": source.load("tokenizer")}, ["a dog [IMG]"], 64)["text_encoder"]
        for source in (flux2, open_model(str(folder)))
    ]
    assert torch.equal(*found)
    assert found[0].unique().numel() > 10
