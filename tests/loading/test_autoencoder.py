"""Half an autoencoder: the bits of the whole one, without a look at the tensors of the other half."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL
from safetensors.torch import load_file, save_file

from blockskip.data.pictures import read_pictures
from blockskip.data.schedule import make_schedule
from blockskip.encoding.pixels import store_pixels
from blockskip.errors import UserError
from blockskip.loading.autoencoder import PARTS, Half, load_autoencoder
from blockskip.loading.source import ModelSource, open_model
from blockskip.planner.encoding import encode_pictures
from blockskip.planner.previews import decoding, drawn
from blockskip.preview.draw import decode
from blockskip.run.fixed import fixed_samples
from blockskip.settings import from_flat
from blockskip.store.groups import GroupStore
from tests.families.groups import CPU
from tests.planner.real_runs import setting_of
from tests.tiny import randomise
from tests.tiny_families import TINY

OTHER: dict[Half, Half] = {"encoder": "decoder", "decoder": "encoder"}
FILE = "diffusion_pytorch_model.safetensors"
Phase = Callable[[ModelSource], list[torch.Tensor]]


@pytest.fixture(scope="session")
def convolved(flux_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    """FLUX.1 with the convolutions between the halves of its autoencoder, which older ones have."""
    folder = shutil.copytree(flux_folder, tmp_path_factory.mktemp("models") / "convolved")
    config = dict(open_model(str(folder)).config("vae"), use_quant_conv=True, use_post_quant_conv=True)
    vae = AutoencoderKL.from_config(config)
    randomise(vae, seed=3)
    vae.save_pretrained(folder / "vae")
    return open_model(str(folder))


def parts(source: ModelSource, half: Half) -> dict[str, torch.Tensor]:
    """What the file holds for a half."""
    return {
        name: value
        for name, value in load_file(source.folder / "vae" / FILE).items()
        if name.partition(".")[0] in PARTS[half]
    }


def without(source: ModelSource, half: Half, folder: Path) -> ModelSource:
    """The pipeline without a half of the autoencoder in its file.

    The other tensors then begin elsewhere in it, which may move the last bit of what a CPU makes of them.
    """
    copied = shutil.copytree(source.folder, folder)
    file, gone = copied / "vae" / FILE, parts(source, half)
    save_file({name: value for name, value in load_file(file).items() if name not in gone}, file)
    return open_model(str(copied))


def through(source: ModelSource, half: Half, vae: torch.nn.Module, dtype: torch.dtype) -> torch.Tensor:
    """What an autoencoder makes of fixed pixels, or of fixed latents."""
    torch.manual_seed(3)
    family, config = source.family, source.config("vae")
    factor = family.vae_factor(config)
    latents = torch.randn(2, family.latent_channels(config), 64 // factor, 96 // factor)
    with torch.no_grad():
        if half == "decoder":
            return family.decode(vae, latents.to(dtype))
        return family.encode_pixels(vae, torch.rand(2, 3, 64, 96).to(dtype) * 2 - 1, latents)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("half", PARTS)
@pytest.mark.parametrize("name", [*TINY, "convolved"])
def test_a_half_gives_the_bits_of_the_whole_and_is_all_that_is_there(
    request: pytest.FixtureRequest, name: str, half: Half, dtype: torch.dtype
) -> None:
    source: ModelSource = request.getfixturevalue(name)
    whole, vae = source.load("vae", dtype), load_autoencoder(source, half, dtype, CPU)
    assert torch.equal(through(source, half, vae, dtype), through(source, half, whole, dtype))
    assert vae.state_dict().keys() == whole.state_dict().keys() - parts(source, OTHER[half])
    assert not vae.training and not any(value.requires_grad for value in vae.parameters())


@pytest.mark.parametrize("half", PARTS)
@pytest.mark.parametrize("name", ["flux", "sana", "qwen_image", "flux2", "convolved"])
def test_the_other_half_is_neither_read_nor_missed(
    request: pytest.FixtureRequest, tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, half: Half
) -> None:
    source: ModelSource = request.getfixturevalue(name)
    poorer = without(source, OTHER[half], tmp_path / "model")
    capfd.readouterr()
    vae = load_autoencoder(poorer, half, torch.float32, CPU)
    assert capfd.readouterr() == ("", "")
    whole = source.load("vae", torch.float32)
    found, expected = (through(source, half, one, torch.float32) for one in (vae, whole))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert "from_config" not in vars(type(vae))


@pytest.mark.parametrize("half", PARTS)
@pytest.mark.parametrize("name", ["flux", "sana", "qwen_image", "flux2", "convolved"])
def test_whoever_asks_for_the_other_half_is_told(request: pytest.FixtureRequest, name: str, half: Half) -> None:
    source: ModelSource = request.getfixturevalue(name)
    vae = load_autoencoder(source, half, torch.float32, CPU)
    with pytest.raises(RuntimeError, match=f"of an autoencoder that was loaded for its {half} alone"):
        through(source, OTHER[half], vae, torch.float32)


@pytest.mark.parametrize("half", PARTS)
def test_a_tensor_that_is_missing_is_told(flux: ModelSource, tmp_path: Path, half: Half) -> None:
    poorer = without(flux, half, tmp_path / "model")
    with pytest.raises(UserError, match=f'lacks the tensor "{half}.*fetch the model again'):
        load_autoencoder(poorer, half, torch.float32, CPU)


def stored(source: ModelSource, photos: Path, folder: Path) -> list[torch.Tensor]:
    """The latents of a run's groups."""
    pictures = read_pictures(photos, "a dog", resolution=32, full_resolution=64)
    sizes = {"resolution": 32, "full_resolution": 64, "stride": source.pixel_stride}
    schedule = make_schedule(from_flat({"train.steps": 2}), pictures, **sizes, distribution="uniform", shift=1.0)
    store = GroupStore(folder)
    keys = store_pixels(source, schedule, schedule.groups[:2], torch.float32, CPU, store)
    return [store.read(key)["latents"] for key in keys]


def fixed(source: ModelSource, photos: Path) -> list[torch.Tensor]:
    """The latents of whole pictures."""
    return [fixed_samples(source, sorted(photos.iterdir())[:1], ["a"], (32, 32), torch.float32, CPU).latents]


def decoded(source: ModelSource) -> list[torch.Tensor]:
    """Pictures, bytes as float32."""
    shape = (1, source.family.latent_channels(source.config("vae")), 8, 8)
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    images = decode(source, [latents], torch.float32, CPU)
    return [torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).float() for image in images]


@pytest.mark.parametrize("source", ["flux", "sana"], indirect=True)
def test_every_phase_loads_its_own_half(source: ModelSource, photos: Path, tmp_path: Path) -> None:
    """With the other half gone from the file each gives what it gave."""
    phases: list[tuple[Half, Phase, float]] = [
        ("encoder", lambda one: stored(one, photos, tmp_path / one.folder.name), 1e-4),
        ("encoder", partial(fixed, photos=photos), 1e-4),
        ("decoder", decoded, 1.0),
    ]
    for number, (half, phase, atol) in enumerate(phases):
        poorer = without(source, OTHER[half], tmp_path / f"model-{number}")
        torch.testing.assert_close(phase(poorer), phase(source), rtol=1e-4, atol=atol)


@pytest.mark.parametrize("name", ["flux", "sana", "qwen_image", "flux2", "convolved"])
def test_a_plan_counts_the_half_alone(request: pytest.FixtureRequest, name: str) -> None:
    source: ModelSource = request.getfixturevalue(name)
    setting, both = setting_of(source), load_file(source.folder / "vae" / FILE)
    whole = sum(value.nbytes for value in both.values())
    for half, plan in (("encoder", encode_pictures(setting)), ("decoder", decoding(setting, drawn(setting)))):
        gone = parts(source, OTHER[half])
        kept = sum(value.nbytes for name, value in both.items() if name not in gone)
        assert plan.device["weights"] == kept < 0.8 * whole
        buffers = sum(value.nbytes for name, value in both.items() if name.startswith("bn."))  # FLUX.2's statistics
        assert plan.read_bytes == kept - buffers


@pytest.mark.parametrize("half", ["encoder", "decoder"])
def test_it_is_loaded_to_the_device(flux: ModelSource, half: Half) -> None:
    vae = load_autoencoder(flux, half, torch.float32, torch.device("meta"))
    assert {value.device.type for value in vae.state_dict().values()} == {"meta"}
    assert not any(value.requires_grad for value in vae.parameters()) and not vae.training
