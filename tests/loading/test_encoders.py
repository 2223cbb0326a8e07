"""Text encoders layer by layer: the bits of the whole encoder, one layer's weights in memory, from whatever files.

The expected values are those of the encoder that ``ModelSource.load`` gives from the very same files.
"""

import gc
import json
import math
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    Gemma2Config,
    Gemma2Model,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    T5Config,
    T5EncoderModel,
)

from blockskip.errors import UserError
from blockskip.families import family_of
from blockskip.loading.encoders import TOGETHER, StreamedEncoder, layer_names
from blockskip.loading.source import ModelSource
from blockskip.memory import release
from blockskip.planner.parts import empty_part
from blockskip.precision import compute
from tests.tiny import randomise

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
IDS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}


def clip() -> nn.Module:
    return CLIPTextModel(CLIPTextConfig(**SIZES, **IDS, projection_dim=32))


def projected() -> nn.Module:
    return CLIPTextModelWithProjection(CLIPTextConfig(**SIZES, **IDS, projection_dim=32))


def t5() -> nn.Module:
    return T5EncoderModel(
        T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=48, num_layers=3, num_heads=2, feed_forward_proj="gated-gelu")
    )


def gemma() -> nn.Module:
    return Gemma2Model(Gemma2Config(**SIZES, **IDS, num_key_value_heads=1, head_dim=16, query_pre_attn_scalar=16))


def qwen() -> nn.Module:
    text = SIZES | IDS | {"num_key_value_heads": 1, "max_position_embeddings": 128}
    text |= {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    special = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=text, vision_config=vision | {"fullatt_block_indexes": [1]}, **special)
    )


def llama(tied: bool = False) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES, **IDS, tie_word_embeddings=tied))


#: The layers that prompts go through.
LAYERS = {
    clip: "encoder.layers", projected: "text_model.encoder.layers", t5: "encoder.block", gemma: "layers",
    qwen: "model.language_model.layers",
}  # fmt: skip
KINDS = list(LAYERS)
#: Other names under which checkpoints hold the same tensors: what is put before a name, or taken from it.
OTHER_NAMES: dict[Callable[[], nn.Module], dict[str, Callable[[str], str]]] = {
    clip: {"with the model's prefix": lambda name: f"text_model.{name}"},
    t5: {"with the model's prefix": lambda name: f"transformer.{name}"},
    gemma: {"with the model's prefix": lambda name: f"model.{name}"},
    qwen: {
        "as the classes name them now": lambda name: (
            name if name.startswith("lm_head") else f"model.{name}" if name.startswith("visual")
            else name.replace("model.", "model.language_model.", 1)
        )
    },
}  # fmt: skip


def saved(folder: Path, make: Callable[[], nn.Module], **options: Any) -> ModelSource:
    """A pipeline's folder with only a text encoder in it."""
    model = make()
    randomise(model, seed=3)
    model.save_pretrained(folder / "text_encoder", **options)
    entry = {"text_encoder": ["transformers", type(model).__name__]}
    (folder / "model_index.json").write_text(json.dumps(entry), encoding="utf-8")
    return ModelSource(str(folder), folder, family_of("FluxPipeline"))


def file_of(source: ModelSource) -> Path:
    return source.folder / "text_encoder" / "model.safetensors"


def change(source: ModelSource, edit: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Rewrite the weights file."""
    save_file(edit(load_file(file_of(source))), file_of(source), {"format": "pt"})


def prompts(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(ids, mask), (1, 9) each, the mask of another length every time; pads are 0, the last token 1."""
    found = []
    for index in range(count):
        length = 3 + index % 6
        ids = (torch.arange(9) * (index + 3)) % 55 + 3
        ids[length - 1], ids[length:] = 1, 0
        found.append((ids[None], (torch.arange(9) < length).long()[None]))
    return found


def encode(model: nn.Module, dtype: torch.dtype, ids: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    """Every tensor that the encoder gives: the last state, the pooled one if there is one, and all states between."""
    with torch.no_grad(), compute(CPU, dtype):
        output = model(ids, attention_mask=mask, output_hidden_states=True)
    return [*(value for value in output.values() if isinstance(value, torch.Tensor)), *output.hidden_states]


def same_bits(source: ModelSource, dtype: torch.dtype, count: int = TOGETHER + 2) -> StreamedEncoder:
    """Encode prompts both ways and compare; the streamed encoder."""
    whole = source.load("text_encoder", dtype)
    expected = [encode(whole, dtype, *prompt) for prompt in prompts(count)]
    streamed = StreamedEncoder(source, "text_encoder", dtype, CPU)
    calls = [partial(encode, streamed.model, dtype, *prompt) for prompt in prompts(count)]
    for one, other in zip(streamed.run(calls), expected, strict=True):
        assert len(one) == len(other) > 1
        assert all(map(torch.equal, one, other))
    assert len({tuple(values[0].flatten().tolist()) for values in expected}) == count
    now, then = streamed.model.state_dict(), whole.state_dict()
    assert {name: value.dtype for name, value in now.items()} == {name: value.dtype for name, value in then.items()}
    return streamed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", KINDS)
def test_the_bits_of_the_whole_encoder(make: Callable[[], nn.Module], dtype: torch.dtype, tmp_path: Path) -> None:
    same_bits(saved(tmp_path, make), dtype)


@pytest.mark.parametrize("make", KINDS)
def test_from_shards_and_from_other_dtypes(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    source = saved(tmp_path, lambda: make().bfloat16(), max_shard_size="10KB")
    assert len(list(file_of(source).parent.glob("*.safetensors"))) > 3
    for dtype in (torch.float32, torch.bfloat16):
        same_bits(source, dtype)


@pytest.mark.parametrize(
    ("make", "rename"), [pytest.param(make, rename, id=f"{make.__name__} {what}")
                         for make, names in OTHER_NAMES.items() for what, rename in names.items()]
)  # fmt: skip
def test_other_names(make: Callable[[], nn.Module], rename: Callable[[str], str], tmp_path: Path) -> None:
    source = saved(tmp_path, make)
    before = load_file(file_of(source)).keys()
    change(source, lambda tensors: {rename(name): value for name, value in tensors.items()})
    assert not set(before) & set(load_file(file_of(source))) - {"lm_head.weight"}
    same_bits(source, torch.float32)


@pytest.mark.parametrize("make", [qwen, llama, partial(llama, True)], ids=["qwen", "llama", "tied"])
def test_a_head_over_the_vocabulary_is_left_out(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    """In no way of loading and in no plan; where it is the embeddings themselves there is nothing to leave out."""
    source = saved(tmp_path, make)
    whole: Any = type(make()).from_pretrained(source.part_folder("text_encoder"), dtype=torch.bfloat16)
    names = {name for name in whole.state_dict() if whole.all_tied_weights_keys or not name.startswith("lm_head.")}
    found = source.load("text_encoder", torch.bfloat16)
    streamed = StreamedEncoder(source, "text_encoder", torch.bfloat16, CPU)
    planned = empty_part(source, "text_encoder", torch.bfloat16)
    assert [model.state_dict().keys() for model in (found, streamed.model, planned)] == [names] * 3
    for prompt in prompts(2):
        assert all(map(torch.equal, *(encode(model.model, torch.bfloat16, *prompt) for model in (found, whole))))


def test_what_stays_float32_beside_float16(tmp_path: Path) -> None:
    streamed = same_bits(saved(tmp_path, t5), torch.float16)
    layer = streamed.model.get_submodule("encoder.block.1")
    assert {str(value.dtype) for name, value in layer.named_parameters() if ".wo." in name} == {"torch.float32"}
    assert {str(value.dtype) for name, value in layer.named_parameters() if ".wo." not in name} == {"torch.float16"}


@pytest.mark.parametrize("make", KINDS)
def test_layers_are_told_by_name(make: Callable[[], nn.Module]) -> None:
    model = make()
    vision = [f"model.visual.blocks.{index}" for index in range(2)] if make is qwen else []
    assert layer_names(model) == vision + [f"{LAYERS[make]}.{index}" for index in range(3)]
    with init_empty_weights():
        assert layer_names(make()) == layer_names(model)


@pytest.mark.parametrize("make", KINDS)
def test_a_few_prompts_share_the_reading_of_a_layer(
    make: Callable[[], nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    fill = StreamedEncoder._fill
    monkeypatch.setattr(StreamedEncoder, "_fill", lambda encoder, name: read.append(name) or fill(encoder, name))
    count = 2 * TOGETHER + 1
    same_bits(saved(tmp_path, make), torch.float32, count)
    once = [f"{LAYERS[make]}.{index}" for index in range(3)]
    assert read == once * math.ceil(count / TOGETHER)  # and a vision tower, which nothing goes through, never


def weight_bytes() -> int:
    """Of the matrices that are alive and were made since the garbage collector was frozen; activations are smaller."""
    gc.collect()
    found = {}
    for value in gc.get_objects():
        if issubclass(type(value), torch.Tensor) and not value.is_meta and value.numel() >= 512:
            found[value.data_ptr()] = value.numel() * value.element_size()
    return sum(found.values())


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [clip, t5, gemma])
def test_one_layer_is_alive_at_a_time(
    make: Callable[[], nn.Module], stored: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = saved(tmp_path, lambda: make().to(stored))

    def most() -> int:
        gc.freeze()
        seen = []
        streamed = StreamedEncoder(source, "text_encoder", torch.float32, CPU)
        for name in layer_names(streamed.model):
            streamed.model.get_submodule(name).register_forward_hook(lambda *_: seen.append(weight_bytes()))
        list(streamed.run([partial(encode, streamed.model, torch.float32, *prompt) for prompt in prompts(2)]))
        assert len(seen) == 6
        assert all(value.is_meta for name in layer_names(streamed.model)
                   for value in streamed.model.get_submodule(name).parameters())  # fmt: skip
        seen.append(weight_bytes())
        assert seen[-1] < min(seen[:-1])
        return max(seen)

    whole = make()
    sizes = {name: value.numel() * 4 for name, value in whole.named_parameters() if value.numel() >= 512}
    layers = [sum(size for name, size in sizes.items() if name.startswith(f"{layer}.")) for layer in layer_names(whole)]
    rest = sum(sizes.values()) - sum(layers)
    del whole
    assert most() <= rest + max(layers)
    monkeypatch.setattr(StreamedEncoder, "_drop", lambda encoder: None)
    with pytest.raises(AssertionError):
        most()


def test_nothing_of_it_stays(tmp_path: Path) -> None:
    streamed = same_bits(saved(tmp_path, t5), torch.float32)
    alive = [weakref.ref(module) for module in streamed.model.modules()]
    del streamed
    release()
    assert not [reference for reference in alive if reference() is not None]


def test_transformers_loads_as_before_afterwards(tmp_path: Path) -> None:
    source, broken = saved(tmp_path, t5), saved(tmp_path / "broken", t5)
    names = source.load("text_encoder").state_dict().keys()
    StreamedEncoder(source, "text_encoder", torch.float32, CPU)
    assert source.load("text_encoder").state_dict().keys() == names
    file_of(broken).write_bytes(b"no weights")
    with pytest.raises(Exception, match="header"):
        StreamedEncoder(broken, "text_encoder", torch.float32, CPU)
    assert source.load("text_encoder").state_dict().keys() == names


def without(*names: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda tensors: {name: value for name, value in tensors.items() if name not in names}


WO = "encoder.block.1.layer.1.DenseReluDense.wo.weight"


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (without("shared.weight"), "lack encoder.embed_tokens.weight and 1 more,"),  # one tensor of two names
        (without("encoder.final_layer_norm.weight"), "lack encoder.final_layer_norm.weight,"),
        (without(WO), f"lack {WO},"),
        (without(WO, WO.replace("wo", "wi_0")), f"lack {WO.replace('wo', 'wi_0')} and 1 more,"),
        (lambda tensors: tensors | {WO: tensors[WO][:5].clone()}, f"lack {WO}, or hold it in another shape"),
    ],
)
def test_a_missing_tensor_is_told_in_a_sentence(edit: Any, words: str, tmp_path: Path) -> None:
    source = saved(tmp_path, t5)
    change(source, edit)
    with pytest.raises(UserError) as error:
        streamed = StreamedEncoder(source, "text_encoder", torch.float32, CPU)
        list(streamed.run([partial(encode, streamed.model, torch.float32, *prompt) for prompt in prompts(2)]))
    assert len(error.value.problems) == 1
    assert words in str(error.value)
    assert str(file_of(source).parent) in str(error.value)
    assert "fetch the model again" in str(error.value)
