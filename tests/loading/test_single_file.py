"""A transformer from a file of its own: the same tensors as the folder's, and one sentence about every other file."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file

from blockskip.adapters.difference import save_difference
from blockskip.errors import UserError
from blockskip.loading.source import ModelSource, open_model
from blockskip.loading.transformer import load_transformer
from blockskip.loading.weights import Weights
from blockskip.store.files import write_atomically
from tests.originals import ORIGINALS, PREFIX, write_original
from tests.originals import transformer_state as state
from tests.tiny import randomise

NAME = "diffusion_pytorch_model.safetensors"


def from_file(pipeline: Path, file: Path) -> ModelSource:
    """The pipeline with its transformer from a file, and without weights of its own."""
    bare = file.parent / "bare"
    if not bare.exists():
        shutil.copytree(pipeline, bare, ignore=lambda folder, names: [NAME] if "transformer" in folder else [])
    return open_model(str(bare), transformer=str(file))


def read(source: ModelSource) -> dict[str, torch.Tensor]:
    """Every tensor of the transformer, as a phase would read them."""
    weights = Weights(source.part_folder("transformer"))
    return weights.read(weights.files)


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """Names, dtypes and bits."""
    return found.keys() == expected.keys() and all(
        found[name].dtype == value.dtype and torch.equal(found[name], value) for name, value in expected.items()
    )


@pytest.fixture(params=ORIGINALS)
def pipeline(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """Each family that diffusers has a converter for."""
    folder: Path = request.getfixturevalue(f"{request.param}_folder")
    if request.param == "lumina2":  # the published ratio of queries to keys, 3 to 1, is written into the converter
        folder = shutil.copytree(folder, tmp_path / "model")
        config = json.loads((folder / "transformer" / "config.json").read_text(encoding="utf-8"))
        model = diffusers.Lumina2Transformer2DModel.from_config(
            config | {"hidden_size": 96, "num_attention_heads": 6, "num_kv_heads": 2}
        )
        randomise(model, seed=1)
        model.save_pretrained(folder / "transformer")
    return request.param, folder


@pytest.mark.parametrize("prefix", ["", PREFIX], ids=["alone", "whole"])
def test_the_original_layout_gives_the_tensors_of_the_folder(
    pipeline: tuple[str, Path], prefix: str, tmp_path: Path
) -> None:
    """The transformer alone, or in a checkpoint with text encoder and autoencoder."""
    family, folder = pipeline
    others = {
        "text_encoders.t5xxl.transformer.encoder.block.0.layer.0.SelfAttention.q.weight": torch.zeros(4, 4).half(),
        "vae.decoder.conv_in.weight": torch.zeros(4, 4, 3, 3), "first_stage_model.encoder.conv_in.bias": torch.ones(3),
        "text_encoders.clip_l.logit_scale": torch.ones(1).to(torch.float8_e4m3fn),
    }  # fmt: skip
    file = write_original(family, folder, tmp_path / "file.safetensors", prefix, others if prefix else None)
    source = from_file(folder, file)
    assert same(read(source), state(folder))
    model = load_transformer(source, [0], torch.float32, torch.device("cpu"))
    names = source.family.layout.names(model)
    loaded = {name: value for name, value in model.state_dict().items() if not name.startswith(f"{names[0]}.")}
    assert loaded and all(torch.equal(value, state(folder)[name]) for name, value in loaded.items())


def test_a_file_of_torch_save_is_converted_too(sana_folder: Path, tmp_path: Path) -> None:
    tensors = ORIGINALS["sana"].state(state(sana_folder))
    torch.save({"state_dict": tensors, "epoch": 3}, tmp_path / "sana.pth")
    assert same(read(from_file(sana_folder, tmp_path / "sana.pth")), state(sana_folder))


@pytest.mark.parametrize("family", ["flux", "pixart_sigma"])  # with a converter, and without
def test_a_file_in_diffusers_names_is_not_copied(
    family: str, request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder: Path = request.getfixturevalue(f"{family}_folder")
    file = shutil.copy(folder / "transformer" / NAME, tmp_path / "mine.safetensors")
    source = from_file(folder, file)
    place = source.part_folder("transformer")
    assert (place / NAME).resolve() == file and sorted(p.name for p in place.iterdir()) == ["config.json", NAME]
    assert Weights(place).identity() == Weights(folder / "transformer").identity()
    assert same(read(source), state(folder)) and "Converting" not in capsys.readouterr().out
    # another file under the same name has another folder, and another identity
    changed = state(folder)
    next(iter(changed.values())).add_(1)
    save_file(changed, file)
    again = from_file(folder, file).part_folder("transformer")
    assert again != place and Weights(again).identity() != Weights(folder / "transformer").identity()


def test_where_the_system_makes_no_links_the_file_is_copied(
    flux_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise OSError("a required privilege is not held by the client")

    monkeypatch.setenv("BLOCKSKIP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Path, "symlink_to", refuse)
    file = shutil.copy(flux_folder / "transformer" / NAME, tmp_path / "mine.safetensors")
    source = from_file(flux_folder, file)
    assert same(read(source), state(flux_folder))
    assert [path.is_symlink() for path in source.part_folder("transformer").glob("*.safetensors")] == [False]
    assert len(list((tmp_path / "cache" / "transformers").iterdir())) == 1


@pytest.mark.parametrize("prefix", ["model.diffusion_model.", "diffusion_model.", "transformer.", "model."])
def test_diffusers_names_under_a_prefix(qwen_image_folder: Path, tmp_path: Path, prefix: str) -> None:
    """So programs for drawing keep Qwen-Image, whose original names are diffusers' own."""
    tensors = state(qwen_image_folder)
    save_file({prefix + name: value for name, value in tensors.items()}, tmp_path / "qwen.safetensors")
    assert same(read(from_file(qwen_image_folder, tmp_path / "qwen.safetensors")), tensors)


def test_opening_reads_no_weights(flux_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_original("flux", flux_folder, tmp_path / "file.safetensors")
    monkeypatch.setenv("BLOCKSKIP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("blockskip.loading.unread._from_safetensors", lambda *_: pytest.fail("read"))
    monkeypatch.setattr("blockskip.loading.converted.file_identity", lambda _: pytest.fail("hashed"))
    source = from_file(flux_folder, file)
    assert source.single is not None and source.single.dtype == torch.float32
    assert source.single.size == sum(value.numel() * value.element_size() for value in state(flux_folder).values())
    assert not (tmp_path / "cache").exists()


def tensors_of(
    change: Callable[[dict[str, torch.Tensor]], object], family: str = "flux"
) -> Callable[[Path, Path], None]:
    """Write a changed transformer in diffusers' names."""

    def write(folder: Path, file: Path) -> None:
        tensors = state(folder)
        change(tensors)
        save_file(tensors, file)

    return write


def only(*names: str) -> Callable[[Path, Path], None]:
    """Write a file with such names."""

    def write(folder: Path, file: Path) -> None:
        save_file({name: torch.zeros(4, 4) for name in names}, file)

    return write


def original(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path, Path], None]:
    """Write a changed transformer in the original layout."""

    def write(folder: Path, file: Path) -> None:
        tensors = load_file(write_original("flux", folder, file))
        change(tensors)
        save_file(tensors, file)

    return write


def as_bytes(content: bytes) -> Callable[[Path, Path], None]:
    def write(folder: Path, file: Path) -> None:
        file.write_bytes(content)

    return write


def truncated(folder: Path, file: Path) -> None:
    write_original("flux", folder, file)
    file.write_bytes(file.read_bytes()[:-1000])


def damaged_pickle(folder: Path, file: Path) -> None:
    torch.save({"state_dict": state(folder)}, file)
    file.write_bytes(file.read_bytes()[:-1000])


def code_in_a_pickle(folder: Path, file: Path) -> None:
    torch.save({"state_dict": state(folder), "made_by": Path}, file)


def quantised(dtype: torch.dtype) -> Callable[[dict[str, torch.Tensor]], object]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name, value in tensors.items():
            if value.ndim == 2:
                tensors[name] = value.to(dtype)

    return change


def packed(tensors: dict[str, torch.Tensor]) -> None:
    """As bitsandbytes packs four-bit weights, two in a byte."""
    for name, value in list(tensors.items()):
        if value.ndim == 2:
            tensors[name] = torch.zeros((value.numel() // 2, 1), dtype=torch.uint8)
            tensors[f"{name}.absmax"] = torch.zeros(value.numel() // 64)


def fewer_blocks(tensors: dict[str, torch.Tensor]) -> None:
    """Less than half of the names are left."""
    for name in [
        name for name in tensors if "transformer_blocks." in name and "single_transformer_blocks.1" not in name
    ]:
        del tensors[name]


def smaller(tensors: dict[str, torch.Tensor]) -> None:
    """A model of the same class and another size."""
    fewer_blocks(tensors)
    for name, value in tensors.items():
        tensors[name] = value.repeat(*[2] * value.ndim)


def changed_weights(folder: Path, file: Path) -> None:
    """What a run with LISA gives, of nearly all weights."""
    shutil.move(save_difference(file.parent, state(folder), {}, write_atomically), file)


def another_family(folder: Path, file: Path) -> None:
    names = {"x_embedder.proj.weight": (8, 4, 2, 2), "joint_blocks.0.context_block.adaLN_modulation.1.bias": (8,),
             "joint_blocks.37.x_block.mlp.fc1.weight": (8, 8)}  # fmt: skip
    save_file({PREFIX + name: torch.zeros(shape) for name, shape in names.items()}, file)


MISFIT = "give a file of that model, the same one with diffusers' names, or as --model the pipeline of this one"
WRONG: dict[str, tuple[Callable[[Path, Path], None], list[str]]] = {
    "LoRA": (only("lora_unet_double_blocks_0_img_attn_proj.lora_down.weight"), ["is a LoRA; give it as model.base_ad"]),
    "LoRA of older diffusers": (
        only("unet.transformer_blocks.0.attn.processor.to_q_lora.down.weight"), ["is a LoRA; give it as model.base_ad"]
    ),
    "OFT": (only("oft_unet_double_blocks_0_img_attn_proj.oft_blocks"), ["is a LoRA; give it"]),
    "changed weights": (changed_weights, ["is a file of changed weights; give it as --lora to `blockskip generate`"]),
    "LoKr": (only("lycoris_blocks_0.lokr_w1"), ["is a LoRA; give it"]),
    "GGUF": (as_bytes(b"GGUF\3\0\0\0"), ["is a GGUF file", "the .safetensors file", 'model.quantization = "int8"']),
    "fp8": (original(quantised(torch.float8_e4m3fn)), ["quantised (float8_e4m3fn)", "bf16, fp16 or fp32"]),
    "fp8 in diffusers' names": (tensors_of(quantised(torch.float8_e5m2)), ["quantised (float8_e5m2)", "bf16, fp16"]),
    "nf4": (original(packed), ["quantised (uint8)", "bf16, fp16 or fp32"]),
    "T5": (only("encoder.block.0.layer.0.SelfAttention.q.weight", "shared.weight"), ["is a text encoder", "with"]),
    "CLIP": (only("text_model.encoder.layers.0.self_attn.q_proj.weight"), ["is a text encoder", "the transformer"]),
    "Qwen": (only("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"), ["is a text encoder"]),
    "VAE": (only("decoder.conv_in.weight", "encoder.conv_in.weight"), ["is an autoencoder", "the transformer"]),
    "ControlNet": (only("controlnet_blocks.0.weight", "controlnet_x_embedder.weight"), ["is a ControlNet"]),
    "another family": (another_family, ["whose transformer is a FluxTransformer2DModel", "sd35_large", MISFIT]),
    "anything": (only("a", "b.weight"), ["a FluxTransformer2DModel: diffusers cannot convert it; give", MISFIT]),
    "no tensors": (only(), ["holds no tensors", "give a file with"]),
    "another size": (
        original(lambda t: t.update({"img_in.weight": torch.zeros(32, 64)})),
        ["of another size, x_embedder.weight being 32 x 64 where the pipeline's config wants 32 x 16", MISFIT],
    ),
    "another width": (
        original(lambda t: t.update({name: value.repeat(2, *[1] * (value.ndim - 1)) for name, value in t.items()})),
        ["of another size, ", MISFIT],
    ),
    "a block less": (
        original(lambda t: [t.pop(name) for name in list(t) if "single_blocks.1." in name]),
        ["it lacks single_transformer_blocks.1.norm.linear.weight and 13 more", MISFIT],
    ),
    "without guidance": (
        original(lambda t: [t.pop(name) for name in list(t) if "guidance" in name]),
        ["it lacks time_text_embed.guidance", " and 3 more", MISFIT],
    ),
    "a tensor less": (original(lambda t: t.pop("txt_in.bias")), ['diffusers finds no "txt_in.bias" in it']),
    "more": (
        original(lambda t: t.update({"double_blocks.0.img_attn.gate.weight": torch.zeros(2)})),
        ["no place for double_blocks.0.img_attn.gate.weight", MISFIT],
    ),
    "diffusers' names, another size": (
        tensors_of(lambda t: t.update({"x_embedder.weight": torch.zeros(32, 64)})), ["x_embedder.weight being 32 x 64"]
    ),
    "diffusers' names, another width and fewer blocks": (
        tensors_of(smaller), ["of another size, ", ".weight being 64 x 512 where the pipeline's config wants 32 x 256"]
    ),
    "diffusers' names, fewer blocks": (
        tensors_of(fewer_blocks), ["it lacks transformer_blocks.0.norm1.linear.weight and ", MISFIT]
    ),
    "diffusers' names, one less": (tensors_of(lambda t: t.pop("proj_out.bias")), ["it lacks proj_out.bias"]),
    "diffusers' names, one more": (
        tensors_of(lambda t: t.update({"other.bias": torch.zeros(2)})), ["that transformer has no other.bias"]
    ),
    "truncated": (truncated, ["cannot be read (", "fetch it again"]),
    "empty": (as_bytes(b""), ["cannot be read (", "fetch it again"]),
    "text": (as_bytes(b"<!doctype html><title>Sign in</title>"), ["cannot be read (", "fetch it again"]),
    "truncated pickle": (damaged_pickle, ["cannot be read (", "fetch it again"]),
    "code in a pickle": (code_in_a_pickle, ["cannot be read (", "fetch it again"]),
    "missing": (lambda folder, file: None, ["cannot be read (No such file or directory); give a file with"]),
    "folder": (lambda folder, file: file.mkdir(), ["is a folder; give a file, or as --model the folder"]),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_every_other_file_is_one_sentence(name: str, guided_folder: Path, tmp_path: Path) -> None:
    write, fragments = WRONG[name]
    file = tmp_path / "file.safetensors"
    write(guided_folder, file)
    with pytest.raises(UserError) as caught:
        open_model(str(guided_folder), transformer=str(file))
    (sentence,) = caught.value.problems
    assert sentence.startswith(f'model.transformer = "{file}" ') and sentence.endswith(".") and "\n" not in sentence
    for fragment in fragments:
        assert fragment in sentence
    assert len(sentence) < 500


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["original", "diffusers"])
def test_a_file_in_half_precision_is_read_as_it_is(
    flux_folder: Path, tmp_path: Path, layout: str, dtype: torch.dtype
) -> None:
    """As published files are; counters beside the weights are no sign of quantisation."""
    file, expected = (
        tmp_path / "file.safetensors",
        {name: value.to(dtype) for name, value in state(flux_folder).items()},
    )
    tensors = load_file(write_original("flux", flux_folder, file)) if layout == "original" else expected
    save_file({name: value.to(dtype) for name, value in tensors.items()}, file)
    source = from_file(flux_folder, file)
    assert same(read(source), expected)
    assert source.single is not None and source.single.dtype == dtype
    if layout == "original":
        counted = {name: value.to(dtype) for name, value in tensors.items()} | {"steps": torch.tensor(3)}
        save_file({PREFIX + name: value for name, value in counted.items()}, file)
        assert same(read(from_file(flux_folder, file)), expected)


def test_a_file_of_torch_save_without_names_is_told(guided_folder: Path, tmp_path: Path) -> None:
    torch.save([torch.zeros(2)], tmp_path / "file.pth")
    with pytest.raises(UserError, match=r"cannot be read \(it holds no table of tensors\); fetch it again"):
        open_model(str(guided_folder), transformer=str(tmp_path / "file.pth"))


def test_one_of_several_files_is_told(guided_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "diffusion_pytorch_model-00001-of-00003.safetensors"
    write_original("flux", guided_folder, file)
    with pytest.raises(UserError, match=r"is one of several files; give the folder of the pipeline .* as --model\.$"):
        open_model(str(guided_folder), transformer=str(file))
