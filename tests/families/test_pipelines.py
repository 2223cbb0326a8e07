"""Each family's kernels against its diffusers pipeline: text, latents, times, guidance, the step, the decoder."""

import copy
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch

from blockskip.encoding.text import encode_prompts
from blockskip.errors import UserError
from blockskip.families import FAMILIES, family_of, stack_text
from blockskip.loading.source import ModelSource
from blockskip.loading.transformer import load_transformer
from blockskip.preview.denoise import velocity
from tests.families.groups import CPU, distance, forward_inputs, group
from tests.tiny_families import TINY

PROMPTS = ["A photo of sks dog", "  a Red Fox, ünusual & 犬 "]
LENGTH = 64
HEIGHT, WIDTH = 64, 96
SOURCES = [*TINY, "guided", "sd3_bare", "pixart_told"]


class Pipeline:
    """A pipeline whose scheduler's steps are noted as (velocity, time, latents), and the latents after the last one."""

    def __init__(self, source: ModelSource) -> None:
        self.source, self.tiny = source, TINY[source.family.name]
        lacked: set[str] = set().union(*source.family.text_parts) - set().union(*source.text_parts)
        cls = getattr(diffusers, source.family.pipeline_class)
        self.own: Any = cls.from_pretrained(source.folder, **dict.fromkeys(lacked))
        self.own.set_progress_bar_config(disable=True)
        self.tiny.ready(self.own)
        self.steps: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        step = self.own.scheduler.step

        def noted(output: torch.Tensor, time: torch.Tensor, sample: torch.Tensor, **options: Any) -> Any:
            self.steps.append((output.clone(), time.clone(), sample.clone()))
            stepped = step(output, time, sample, **options)
            self.last: torch.Tensor = stepped[0]
            return stepped

        self.own.scheduler.step = noted

    def __call__(self, prompts: list[str], **options: Any) -> Any:
        given: dict[str, Any] = {"prompt": list(prompts), "generator": torch.Generator().manual_seed(0)}
        given |= {"height": HEIGHT, "width": WIDTH, "num_inference_steps": 3, **self.tiny.length(self.own, LENGTH)}
        self.steps.clear()
        with torch.no_grad():
            return self.own(**(given | dict(self.tiny.plain) | options)).images

    def unpacked(self, tensor: torch.Tensor) -> torch.Tensor:
        """(B, C, h, w) of latents as the pipeline keeps them."""
        return self.tiny.unpacked(self.own, tensor, HEIGHT, WIDTH)


@pytest.fixture(scope="module")
def pipelines(request: pytest.FixtureRequest) -> Callable[[str], Pipeline]:
    made: dict[str, Pipeline] = {}

    def get(name: str) -> Pipeline:
        if name not in made:
            made[name] = Pipeline(request.getfixturevalue(name))
        return made[name]

    return get


@pytest.mark.parametrize("name", SOURCES)
def test_text_is_encoded_as_the_pipeline_encodes_it(pipelines: Callable[[str], Pipeline], name: str) -> None:
    pipeline = pipelines(name)
    texts = encode_prompts(pipeline.source, PROMPTS, LENGTH, torch.float32, CPU)
    with torch.no_grad():
        for prompt, text in zip(PROMPTS, texts, strict=True):
            expected = pipeline.tiny.pipeline_text(pipeline.own, [prompt], LENGTH)
            assert text.keys() == expected.keys()
            assert all(torch.equal(value, expected[part]) for part, value in text.items())
        together = pipeline.tiny.pipeline_text(pipeline.own, PROMPTS, LENGTH)
    stacked = stack_text(texts)
    assert all(distance(stacked[part].float(), value.float()) < 1e-6 for part, value in together.items())
    assert all(stacked[part].shape == value.shape for part, value in together.items())
    assert distance(*stacked["prompt_embeds"].split(1)) > 0.1


@pytest.mark.parametrize("name", SOURCES)
def test_a_step_is_the_pipeline_s_own(pipelines: Callable[[str], Pipeline], name: str) -> None:
    """With the pipeline's text, noise and times, velocities and latents are the pipeline's to the last bit."""
    pipeline = pipelines(name)
    source, family = pipeline.source, pipeline.source.family
    pipeline(PROMPTS, output_type="latent", **({"guidance_scale": 2.5} if name == "guided" else {}))
    with torch.no_grad():
        text = pipeline.tiny.pipeline_text(pipeline.own, PROMPTS, LENGTH)
    config = source.config("transformer")
    scheduler = source.load("scheduler")
    family.set_timesteps(scheduler, 3, (HEIGHT // source.pixel_stride) * (WIDTH // source.pixel_stride), CPU)
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


@pytest.mark.parametrize("name", TINY)
def test_latents_are_decoded_as_the_pipeline_decodes_them(pipelines: Callable[[str], Pipeline], name: str) -> None:
    pipeline = pipelines(name)
    pixels = pipeline(PROMPTS[:1], output_type="pt")
    with torch.no_grad():
        decoded = pipeline.source.family.decode(pipeline.own.vae, pipeline.unpacked(pipeline.last))
    assert torch.equal((decoded / 2 + 0.5).clamp(0, 1), pixels)
    assert pixels.std() > 0.05


@pytest.mark.parametrize("name", TINY)
def test_encode_and_decode_are_the_autoencoder_s_round_trip(pipelines: Callable[[str], Pipeline], name: str) -> None:
    source, vae = pipelines(name).source, copy.deepcopy(pipelines(name).own.vae).double()
    pixels = torch.rand(2, 3, 64, 96, dtype=torch.float64) * 2 - 1
    factor, channels = source.family.vae_factor(vae.config), source.family.latent_channels(vae.config)
    noise = torch.randn(2, channels, 64 // factor, 96 // factor)
    with torch.no_grad():
        frames = vae.encode(pixels[:, :, None] if TINY[name].video else pixels)
        if TINY[name].mode:
            latent = frames.latent_dist.mode()
        elif hasattr(frames, "latent_dist"):
            torch.manual_seed(5)
            latent = frames.latent_dist.sample()
            torch.manual_seed(5)
            noise = torch.randn(noise.shape, dtype=torch.float64)
            assert distance(frames.latent_dist.mean, latent) > 1e-3
        else:
            latent = frames.latent
        own = vae.decode(latent, return_dict=False)[0]
        encoded = source.family.encode_pixels(vae, pixels, noise)
        assert encoded.shape == noise.shape
        plain = latent[:, :, 0] if TINY[name].video else latent
        assert encoded.shape != plain.shape or distance(encoded, plain) > 1e-2  # scaled
        assert distance(source.family.decode(vae, encoded), own[:, :, 0] if TINY[name].video else own) < 1e-12


def test_qwen_s_latents_have_the_autoencoder_s_statistics(qwen_image: ModelSource) -> None:
    """A scale that encode and decode share would pass unseen by their round trip."""
    vae, pixels = qwen_image.load("vae"), torch.rand(1, 3, 32, 48) * 2 - 1
    with torch.no_grad():
        mean = vae.encode(pixels[:, :, None]).latent_dist.mean[:, :, 0]
        found = qwen_image.family.encode_pixels(vae, pixels, torch.zeros_like(mean))
    for channel in range(4):
        expected = (mean[:, channel] - vae.config.latents_mean[channel]) / vae.config.latents_std[channel]
        assert torch.allclose(found[:, channel], expected, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("name", [*TINY, "sd3_bare"])
def test_a_transformer_is_loaded_as_diffusers_loads_it(
    request: pytest.FixtureRequest, name: str, dtype: torch.dtype
) -> None:
    """Dtypes and bits of all parameters, and of buffers that no file has and that stay in float32."""
    source: ModelSource = request.getfixturevalue(name)
    cls = getattr(diffusers, source.family.transformer_class)
    expected = cls.from_pretrained(source.folder / "transformer", torch_dtype=dtype)
    found = load_transformer(source, [], dtype, CPU)
    own, theirs = (dict(model.named_parameters()) | dict(model.named_buffers()) for model in (found, expected))
    assert own.keys() == theirs.keys()
    for key, value in theirs.items():
        assert own[key].dtype == value.dtype and torch.equal(own[key], value), key


def test_the_tests_know_every_family() -> None:
    assert TINY.keys() == {family.name for family in FAMILIES}


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
    assert family_of(family.pipeline_class) is family
    same = [one for one in FAMILIES if one.transformer_class == family.transformer_class]
    assert family_of(family.transformer_class) is same[0]
    assert hasattr(diffusers, family.pipeline_class)
    assert hasattr(diffusers, family.transformer_class)


def test_another_family_is_told_what_there_is() -> None:
    known = ", ".join(family.pipeline_class for family in FAMILIES)
    with pytest.raises(UserError, match=f"supported are {known}"):
        family_of("StableDiffusionPipeline")
