"""PixArt's noise, which is a DDPM's: time and picture as its pipeline's process has them, and the noise as target."""

import shutil
from pathlib import Path

import pytest
import torch
from diffusers import DDPMScheduler

from blockskip.loading.source import ModelSource, open_model
from blockskip.method.split import Split
from blockskip.planner.parts import empty_part
from blockskip.training.step import training_loss
from tests.families.groups import GUIDANCE, forward_inputs, group, stubbed, transformer


@pytest.mark.parametrize("name", ["pixart_sigma", "pixart_alpha"])
def test_latents_are_noised_by_the_pipeline_s_process(request: pytest.FixtureRequest, name: str) -> None:
    source: ModelSource = request.getfixturevalue(name)
    process = DDPMScheduler.from_config(source.load("scheduler").config)
    times = torch.tensor([0, 1, 17, 499, 500, 998, 999])
    latents, noise = torch.randn(7, 4, 3, 5), torch.randn(7, 4, 3, 5)
    found = source.family.add_noise(latents, noise, times / 1000)
    assert torch.allclose(found, process.add_noise(latents, noise, times), atol=1e-6)
    # Near sigma = 1 there is hardly any picture left, at 0 hardly any noise.
    assert (found[-1] - noise[-1]).norm() < 0.02 * noise[-1].norm()
    assert (found[0] - latents[0]).norm() < 0.02 * latents[0].norm()


def test_the_model_is_told_whole_times_of_its_process(pixart_sigma: ModelSource) -> None:
    batch = group(pixart_sigma, 4)
    batch.sigma = torch.tensor([1e-5, 0.24960, 0.24940, 1.0])
    assert forward_inputs(pixart_sigma, batch)["timestep"].tolist() == [0.0, 250.0, 249.0, 999.0]


def test_the_loss_is_that_of_the_noise(pixart_sigma: ModelSource) -> None:
    source, batch = pixart_sigma, group(pixart_sigma)
    model = stubbed(source, Split(0, 0))
    with torch.no_grad():
        output = model.model(**forward_inputs(source, batch))[0]
        loss = training_loss(model, source.family, source.config("transformer"), batch, GUIDANCE, torch.float32)
    assert output.shape[1] == 2 * batch.latents.shape[1]  # noise and variance
    errors = (output.chunk(2, dim=1)[0] - batch.noise).square().mean((1, 2, 3))
    assert torch.allclose(loss, (errors * batch.weight).mean())


def test_a_model_that_is_told_sizes_is_told_those_of_the_patch(
    pixart_told: ModelSource, pixart_alpha: ModelSource
) -> None:
    told = forward_inputs(pixart_told, group(pixart_told))["added_cond_kwargs"]
    assert told["resolution"].tolist() == [[64.0, 96.0]] * 2
    assert torch.allclose(told["aspect_ratio"], torch.tensor([[64 / 96]] * 2))
    plain = forward_inputs(pixart_alpha, group(pixart_alpha))["added_cond_kwargs"]
    assert plain == {"resolution": None, "aspect_ratio": None}
    config, batch = dict(pixart_alpha.config("transformer"), use_additional_conditions=None), group(pixart_alpha)
    for size, given in ((128, True), (64, False)):  # the published models of 1024 px leave it open
        config["sample_size"] = size
        inputs = pixart_alpha.family.forward_inputs(config, batch.latents, batch.sigma, batch.text, 1.0)
        assert (inputs["added_cond_kwargs"]["resolution"] is not None) == given


def test_checkpoints_that_still_name_the_class_s_old_name_are_the_same_model(
    pixart_sigma: ModelSource, tmp_path: Path
) -> None:
    """As the published ones do."""
    folder = shutil.copytree(pixart_sigma.folder, tmp_path / "model")
    for file in (folder / "model_index.json", folder / "transformer" / "config.json"):
        file.write_text(file.read_text(encoding="utf-8").replace("PixArtTransformer2DModel", "Transformer2DModel"))
    source = open_model(str(folder))
    assert source.family is pixart_sigma.family
    inputs = forward_inputs(source, group(source))
    with torch.no_grad():
        assert torch.equal(transformer(source)(**inputs)[0], transformer(pixart_sigma)(**inputs)[0])
    planned = empty_part(source, "transformer", torch.float32)
    assert planned.state_dict().keys() == transformer(source).state_dict().keys()
