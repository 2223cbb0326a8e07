"""The built-in configs of published models: their sizes, bare configs, unknown names, and the tool that wrote them."""

import functools
import json
import math
import shutil
from pathlib import Path

import diffusers
import pytest
import torch

from blockskip.errors import UserError
from blockskip.planner import make_setting, named_models, open_for_plan
from blockskip.planner.named import FOLDER
from blockskip.planner.parts import empty_part
from blockskip.settings import from_flat
from tools import named_models as tool

FLUX, SANA = "black-forest-labs/FLUX.1-dev", "Efficient-Large-Model/Sana_1600M_1024px_diffusers"
PIXART = "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS"
SD3, QWEN = "stabilityai/stable-diffusion-3.5-large", "Qwen/Qwen-Image"
FLUX2, KLEIN = "black-forest-labs/FLUX.2-dev", "black-forest-labs/FLUX.2-klein-base-4B"
LUMINA2, COGVIEW4 = "Alpha-VLLM/Lumina-Image-2.0", "THUDM/CogView4-6B"
CHROMA, Z_IMAGE, AURA_FLOW = "lodestones/Chroma1-HD", "Tongyi-MAI/Z-Image-Turbo", "fal/AuraFlow-v0.3"
HIDREAM = "HiDream-ai/HiDream-I1-Full"
#: Published sizes of the transformers, in parameters.
TRANSFORMERS = {
    FLUX: 11.90e9,
    "black-forest-labs/FLUX.1-schnell": 11.89e9,
    "Efficient-Large-Model/Sana_600M_1024px_diffusers": 0.59e9,
    SANA: 1.60e9,
    "Efficient-Large-Model/SANA1.5_4.8B_1024px_diffusers": 4.72e9,
    "stabilityai/stable-diffusion-3-medium-diffusers": 2.03e9,
    "stabilityai/stable-diffusion-3.5-medium": 2.24e9,
    SD3: 8.06e9,
    QWEN: 20.43e9,
    PIXART: 0.61e9,
    "PixArt-alpha/PixArt-XL-2-1024-MS": 0.61e9,
    FLUX2: 32.22e9,
    KLEIN: 3.88e9,
    "black-forest-labs/FLUX.2-klein-base-9B": 9.08e9,
    LUMINA2: 2.61e9,
    COGVIEW4: 6.37e9,
    CHROMA: 8.90e9,
    Z_IMAGE: 6.16e9,
    AURA_FLOW: 6.83e9,
    HIDREAM: 17.11e9,
}
#: Of text encoders, without a head over the vocabulary.
ENCODERS = [
    (FLUX, "text_encoder", 0.123e9), (FLUX, "text_encoder_2", 4.76e9), (SANA, "text_encoder", 2.61e9),
    (SD3, "text_encoder_3", 4.76e9), (QWEN, "text_encoder", 8.29e9 - 0.54e9),
    (FLUX2, "text_encoder", 24.0e9 - 0.67e9), (KLEIN, "text_encoder", 4.02e9), (CHROMA, "text_encoder", 4.76e9),
    ("black-forest-labs/FLUX.2-klein-base-9B", "text_encoder", 8.19e9 - 0.62e9), (Z_IMAGE, "text_encoder", 4.02e9),
    (AURA_FLOW, "text_encoder", 1.22e9), (LUMINA2, "text_encoder", 2.61e9),
    (HIDREAM, "text_encoder_3", 4.76e9), (HIDREAM, "text_encoder_4", 8.03e9 - 0.53e9),
    (COGVIEW4, "text_encoder", 9.40e9 - 0.62e9),
]  # fmt: skip
#: Of autoencoders: channels, and pixels that a side of a latent stands for.
LATENTS = {
    FLUX: (16, 8),
    SANA: (32, 32),
    SD3: (16, 8),
    QWEN: (16, 8),
    FLUX2: (128, 16),
    Z_IMAGE: (16, 8),
    PIXART: (4, 8),
    HIDREAM: (16, 8),
}


@functools.cache
def parameters(model: str, part: str) -> int:
    """How many a part of a built-in model has; nothing is allocated."""
    source, _ = open_for_plan(model)
    if part == "transformer":  # the sine tables of its positions take a minute to compute
        with torch.device("meta"):
            transformer = getattr(diffusers, source.family.transformer_class).from_config(source.config(part))
        return sum(value.numel() for value in transformer.parameters())
    return sum(value.numel() for value in empty_part(source, part, torch.bfloat16).parameters())


def test_every_built_in_model_has_a_published_size() -> None:
    assert sorted(TRANSFORMERS) == named_models() == sorted(tool.MODELS)


@pytest.mark.parametrize("model", TRANSFORMERS)
def test_a_transformer_has_the_published_size(model: str) -> None:
    assert parameters(model, "transformer") == pytest.approx(TRANSFORMERS[model], rel=0.005)


@pytest.mark.parametrize(("model", "part", "count"), ENCODERS)
def test_a_text_encoder_has_the_published_size(model: str, part: str, count: float) -> None:
    assert parameters(model, part) == pytest.approx(count, rel=0.02)


@pytest.mark.parametrize("model", LATENTS)
def test_an_autoencoder_gives_the_published_latents(model: str) -> None:
    source, _ = open_for_plan(model)
    vae = source.config("vae")
    assert (source.family.latent_channels(vae), source.family.vae_factor(vae)) == LATENTS[model]


@pytest.mark.parametrize("model", [FLUX, SANA, QWEN])
def test_a_built_in_model_says_that_it_is_one_and_can_be_set(model: str) -> None:
    source, remarks = open_for_plan(model)
    assert source.name == model
    assert "built in" in remarks[0]
    setting = make_setting(source, from_flat({}), torch.device("cuda"))
    assert setting.split.front + setting.split.tail == math.floor(setting.num_blocks / 2 + 0.5)


def test_a_bare_transformer_config_is_planned_with_the_other_parts_of_its_family(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    config = json.loads((FOLDER / FLUX.replace("/", "--") / "transformer" / "config.json").read_text(encoding="utf-8"))
    file.write_text(json.dumps(config | {"num_layers": 2, "num_single_layers": 4}), encoding="utf-8")
    source, remarks = open_for_plan(str(file))
    assert make_setting(source, from_flat({}), torch.device("cuda")).num_blocks == 6
    assert source.name == str(file)
    assert "assumed" in remarks[0]
    assert FLUX in remarks[0]
    shutil.rmtree(source.folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"_class_name": "UNet2DConditionModel"}'])
def test_another_json_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"config\.json"):
        open_for_plan(str(file))


def test_an_unknown_id_offline_is_one_error_that_names_the_built_in_models() -> None:
    with pytest.raises(UserError) as caught:
        open_for_plan("somebody/else")
    message = str(caught.value)
    assert '"somebody/else"' in message
    assert all(name in message for name in named_models())


def test_the_tool_writes_the_same_files_again(tmp_path: Path) -> None:
    for name in tool.MODELS:
        tool.write(name, tmp_path / name.replace("/", "--"))
    written = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*.json")}
    shipped = {path.relative_to(FOLDER): path.read_bytes() for path in FOLDER.rglob("*") if path.is_file()}
    assert written == shipped


@pytest.mark.parametrize("name", named_models())
def test_the_other_parts_of_a_bare_config_are_of_the_model_it_is_of(name: str) -> None:
    """Where a class has several, with other text encoders: FLUX.2's text is of three widths."""
    own = FOLDER / name.replace("/", "--")
    source, _ = open_for_plan(str(own / "transformer" / "config.json"))
    for part in ("vae", "text_encoder"):
        assert source.config(part) == json.loads((own / part / "config.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"joint_attention_dim": 2048}, "text encoders and autoencoder of no built-in model go with it"),
        ({"in_channels": 128}, "text encoders and autoencoder of no built-in model go with it"),
        ({"num_layers": "abc"}, "no FluxTransformer2DModel can be made from it"),
    ],
)
def test_a_bare_config_that_nothing_goes_with_is_told(change: dict[str, object], sentence: str, tmp_path: Path) -> None:
    config = json.loads((FOLDER / FLUX.replace("/", "--") / "transformer" / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | change), encoding="utf-8")
    with pytest.raises(UserError, match=sentence):
        open_for_plan(str(tmp_path / "config.json"))
