"""Each family's kernels against its diffusers pipeline: text, latents, times, guidance, the step, the decoder."""

from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch

from blockskip.encoding.text import encode_prompts
from blockskip.errors import UserError
from blockskip.families import FAMILIES, family_of, stack_text
from blockskip.loading.source import ModelSource
from blockskip.preview.denoise import velocity
from tests.families.groups import CPU, distance, forward_inputs, group

PROMPTS = ["A photo of sks dog", "  a Red Fox, ünusual & 犬 "]
LENGTH = 24
SOURCES = ["flux", "guided", "sana"]


class Pipeline:
    """A pipeline whose scheduler's steps are noted as (velocity, time, latents)."""

    def __init__(self, source: ModelSource) -> None:
        self.source = source
        self.own: Any = getattr(diffusers, source.family.pipeline_class).from_pretrained(source.folder)
        self.own.set_progress_bar_config(disable=True)
        self.steps: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        step = self.own.scheduler.step

        def noted(output: torch.Tensor, time: torch.Tensor, sample: torch.Tensor, **options: Any) -> Any:
            self.steps.append((output.clone(), time.clone(), sample.clone()))
            return step(output, time, sample, **options)

        self.own.scheduler.step = noted

    def __call__(self, prompts: list[str], **options: Any) -> Any:
        given: dict[str, Any] = {"height": 64, "width": 96, "num_inference_steps": 3, "max_sequence_length": LENGTH}
        if self.source.family.name == "sana":
            given |= {"complex_human_instruction": None, "use_resolution_binning": False, "guidance_scale": 1.0}
        self.steps.clear()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            return self.own(prompts, generator=generator, **(given | options)).images

    def unpacked(self, tensor: torch.Tensor) -> torch.Tensor:
        """(B, C, h, w) of latents as the pipeline keeps them."""
        if self.source.family.name == "sana":
            return tensor
        return self.own._unpack_latents(tensor, 64, 96, self.own.vae_scale_factor)


@pytest.fixture(scope="module")
def pipelines(flux: ModelSource, guided: ModelSource, sana: ModelSource) -> Callable[[str], Pipeline]:
    made: dict[str, Pipeline] = {}
    sources = {"flux": flux, "guided": guided, "sana": sana}

    def get(name: str) -> Pipeline:
        if name not in made:
            made[name] = Pipeline(sources[name])
        return made[name]

    return get


@pytest.mark.parametrize("name", SOURCES)
def test_text_is_encoded_as_the_pipeline_encodes_it(pipelines: Callable[[str], Pipeline], name: str) -> None:
    pipeline = pipelines(name)
    texts = encode_prompts(pipeline.source, PROMPTS, LENGTH, torch.float32, CPU)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        with torch.no_grad():
            if name == "sana":
                embeds, mask, _, _ = pipeline.own.encode_prompt(prompt, False, max_sequence_length=LENGTH)
                assert torch.equal(text["prompt_attention_mask"], mask)
            else:
                embeds, pooled, ids = pipeline.own.encode_prompt(prompt, prompt, max_sequence_length=LENGTH)
                assert torch.equal(text["pooled_prompt_embeds"], pooled)
                inputs = forward_inputs(pipeline.source, group(pipeline.source))
                assert torch.equal(ids[: inputs["txt_ids"].shape[0]], inputs["txt_ids"])
        assert text["prompt_embeds"].shape[:2] == (1, LENGTH)
        assert torch.equal(text["prompt_embeds"], embeds)
    assert distance(texts[0]["prompt_embeds"], texts[1]["prompt_embeds"]) > 0.1


@pytest.mark.parametrize("name", SOURCES)
def test_a_step_is_the_pipeline_s_own(pipelines: Callable[[str], Pipeline], name: str) -> None:
    pipeline = pipelines(name)
    source, family = pipeline.source, pipeline.source.family
    options = {"guidance_scale": 2.5} if name == "guided" else {}
    pipeline(PROMPTS, output_type="latent", **options)
    text = stack_text(encode_prompts(source, PROMPTS, LENGTH, torch.float32, CPU))
    config = source.config("transformer")
    scheduler = source.load("scheduler")
    family.set_timesteps(scheduler, 3, (64 // source.pixel_stride) * (96 // source.pixel_stride), CPU)
    assert len(pipeline.steps) == 3
    latents = pipeline.unpacked(pipeline.steps[0][2])
    for (output, time, sample), own in zip(pipeline.steps, scheduler.timesteps, strict=True):
        assert torch.equal(own, time)
        assert torch.equal(latents, pipeline.unpacked(sample))
        sigma = time.float().expand(2) / 1000
        with torch.no_grad():
            found = velocity(pipeline.own.transformer, family, config, latents, sigma, text, 2.5)
        assert torch.equal(found, pipeline.unpacked(output))
        latents = scheduler.step(found, time, latents, return_dict=False)[0]


@pytest.mark.parametrize("name", ["flux", "sana"])
def test_latents_are_decoded_as_the_pipeline_decodes_them(pipelines: Callable[[str], Pipeline], name: str) -> None:
    pipeline = pipelines(name)
    latents = pipeline.unpacked(pipeline(PROMPTS[:1], output_type="latent"))
    pixels = pipeline(PROMPTS[:1], output_type="pt")
    with torch.no_grad():
        decoded = pipeline.source.family.decode(pipeline.own.vae, latents)
    assert torch.equal((decoded / 2 + 0.5).clamp(0, 1), pixels)


@pytest.mark.parametrize("name", ["flux", "sana"])
def test_encode_and_decode_are_the_autoencoder_s_round_trip(pipelines: Callable[[str], Pipeline], name: str) -> None:
    source, vae = pipelines(name).source, pipelines(name).own.vae
    pixels = torch.rand(2, 3, 64, 96) * 2 - 1
    factor, channels = source.family.vae_factor(vae.config), source.family.latent_channels(vae.config)
    noise = torch.randn(2, channels, 64 // factor, 96 // factor)
    with torch.no_grad():
        if name == "flux":
            posterior = vae.encode(pixels).latent_dist
            torch.manual_seed(5)
            latent = posterior.sample()
            torch.manual_seed(5)
            noise = torch.randn(noise.shape)
            assert distance(posterior.mean, latent) > 1e-3
        else:
            latent = vae.encode(pixels).latent
        encoded = source.family.encode_pixels(vae, pixels, noise)
        assert encoded.shape == noise.shape
        assert distance(source.family.decode(vae, encoded), vae.decode(latent, return_dict=False)[0]) < 1e-6
        scaled = (latent - (vae.config.shift_factor if name == "flux" else 0)) * vae.config.scaling_factor
        assert distance(encoded, scaled) < 1e-6


def test_time_is_sigma_for_flux_and_a_thousand_sigma_for_sana(flux: ModelSource, sana: ModelSource) -> None:
    batch = group(flux)
    assert torch.equal(forward_inputs(flux, batch)["timestep"], batch.sigma)
    batch = group(sana)
    assert torch.equal(forward_inputs(sana, batch)["timestep"], batch.sigma * 1000)
    scaled = dict(sana.config("transformer"), timestep_scale=0.001)
    inputs = sana.family.forward_inputs(scaled, batch.latents, batch.sigma, batch.text, 1.0)
    assert torch.allclose(inputs["timestep"], batch.sigma)


def test_guidance_is_one_number_a_sample_where_the_model_takes_it(
    flux: ModelSource, guided: ModelSource, sana: ModelSource
) -> None:
    assert forward_inputs(flux, group(flux))["guidance"] is None
    assert forward_inputs(sana, group(sana))["guidance"] is None
    guidance = forward_inputs(guided, group(guided, 3))["guidance"]
    assert guidance.shape == (3,)
    assert guidance.dtype == torch.float32
    assert set(guidance.tolist()) == {3.5}
    sprint = dict(sana.config("transformer"), guidance_embeds=True)
    batch = group(sana, 3)
    assert (
        sana.family.forward_inputs(sprint, batch.latents, batch.sigma, batch.text, 2.0)["guidance"].tolist()
        == [2.0] * 3
    )


def test_latents_are_packed_as_the_pipeline_packs_them(pipelines: Callable[[str], Pipeline], flux: ModelSource) -> None:
    batch, own = group(flux), pipelines("flux").own
    inputs = forward_inputs(flux, batch)
    noisy = (1 - batch.sigma[:, None, None, None]) * batch.latents + batch.sigma[:, None, None, None] * batch.noise
    packed = own._pack_latents(noisy, 2, 4, 8, 12)
    assert torch.equal(inputs["hidden_states"], packed)
    assert torch.equal(inputs["img_ids"], own._prepare_latent_image_ids(2, 4, 6, CPU, torch.float32))
    assert torch.equal(flux.family.velocity(packed, batch.latents), noisy)


def test_sana_drops_learned_variance(sana: ModelSource) -> None:
    latents, output = torch.zeros(2, 8, 3, 3), torch.randn(2, 16, 3, 3)
    assert torch.equal(sana.family.velocity(output, latents), output[:, :8])


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_is_found_by_its_classes(family: Any) -> None:
    assert family_of(family.pipeline_class) is family_of(family.transformer_class) is family
    assert hasattr(diffusers, family.pipeline_class)
    assert hasattr(diffusers, family.transformer_class)


def test_another_family_is_told_what_there_is() -> None:
    with pytest.raises(UserError, match="supported are FluxPipeline, SanaPipeline"):
        family_of("StableDiffusionPipeline")
