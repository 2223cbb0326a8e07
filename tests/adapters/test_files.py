"""The saved adapter: what diffusers makes of the file is what was trained, and broken files are told."""

import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from blockskip.adapters.files import DIFFUSERS_KEY, FILE_NAME, find_lora, lora_header, read_lora, save_lora
from blockskip.adapters.frozen import FrozenAdapters
from blockskip.adapters.lora import adapter_state
from blockskip.errors import UserError
from blockskip.loading.source import ModelSource
from blockskip.loading.transformer import empty_transformer
from blockskip.method.split import Split
from blockskip.store.files import write_atomically
from tests.families.groups import (
    ALPHA,
    RANK,
    adapt,
    capture_features,
    forward_inputs,
    group,
    layers,
    stubbed,
    transformer,
)
from tests.method.bases import first
from tests.tiny_families import TINY

SPLIT = Split(2, 0)  # a front alone: the live model is exact
#: What diffusers says of every adapter of the FLUX kind or of Stable Diffusion 3 that has no text encoder in it.
ALWAYS_SAID = (
    "No LoRA keys associated to CLIPTextModel", "No LoRA keys associated to T5EncoderModel",
    "Expected types for text_processor",  # LongCat-Image's, for which a tokenizer stands in its tiny pipeline
)  # fmt: skip


@pytest.fixture
def said() -> Iterator[list[str]]:
    """Everything that diffusers, PEFT and Python's warnings say, from the level of warnings on."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Keep(logging.WARNING)
    names = ("diffusers", "peft", "transformers")
    levels = [logging.getLogger(name).level for name in names]
    for name in names:
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).setLevel(logging.WARNING)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
        found += [str(one.message) for one in caught]
    for name, level in zip(names, levels, strict=True):
        logging.getLogger(name).removeHandler(handler)
        logging.getLogger(name).setLevel(level)


def save(source: ModelSource, model: Any, folder: Path, alpha: float = ALPHA) -> Path:
    middle = SPLIT.middle(source.family.layout.count(model))
    names = layers(source, empty_transformer(source), middle)
    header = {DIFFUSERS_KEY: lora_header(names, RANK, alpha), "ss_steps": "7"}
    return save_lora(folder, adapter_state(model), header, write_atomically)


def pipeline_of(source: ModelSource) -> Any:
    return getattr(diffusers, source.family.pipeline_class).from_pretrained(source.folder)


def test_the_saved_adapter_in_the_real_pipeline_is_the_live_model(
    source: ModelSource, tmp_path: Path, said: list[str]
) -> None:
    batch, skipped = group(source), stubbed(source, SPLIT)
    features = capture_features(source, transformer(source), SPLIT, batch)
    inputs = forward_inputs(source, batch)
    with torch.no_grad():
        base = first(skipped(features, **inputs))
    parameters = adapt(source, skipped.model, SPLIT.middle(skipped.num_blocks))
    save(source, skipped.model, tmp_path)
    with torch.no_grad():
        live = first(skipped(features, **inputs))

    pipeline = pipeline_of(source)
    TINY[source.family.name].load_lora(pipeline, tmp_path)
    assert [one for one in said if not one.startswith(ALWAYS_SAID)] == []
    loaded = {name for name, _ in pipeline.transformer.named_parameters() if "lora_" in name}
    assert {name.rpartition(".lora_")[0] for name in loaded} == {name.rpartition(".lora_")[0] for name in parameters}
    with torch.no_grad():
        drawn = first(pipeline.transformer(**inputs))
        assert torch.equal(drawn, live)
        assert (live - base).norm() > 0.01 * base.norm()
        if hasattr(pipeline, "unload_lora_weights"):
            pipeline.unload_lora_weights()
            assert torch.equal(first(pipeline.transformer(**inputs)), base)


@pytest.mark.parametrize("alpha", [1.0, 16.0])
def test_alpha_travels_with_the_file(flux: ModelSource, tmp_path: Path, alpha: float) -> None:
    inputs, model = forward_inputs(flux, group(flux)), transformer(flux)
    adapt(flux, model, SPLIT.middle(8), alpha=alpha)
    save(flux, model, tmp_path, alpha)
    whole = pipeline_of(flux)
    whole.load_lora_weights(tmp_path)
    scales = {scale for layer in whole.transformer.modules() if isinstance(layer, LoraLayer)
              for scale in layer.scaling.values()}  # fmt: skip
    assert scales == {alpha / RANK}
    with torch.no_grad():
        assert torch.equal(first(whole.transformer(**inputs)), first(model(**inputs)))


def test_the_file_s_metadata_rebuilds_exactly_these_layers_on_the_whole_model(
    source: ModelSource, tmp_path: Path
) -> None:
    skipped = stubbed(source, SPLIT)
    adapt(source, skipped.model, SPLIT.middle(skipped.num_blocks))
    with safe_open(save(source, skipped.model, tmp_path), framework="pt") as file:
        values = json.loads(file.metadata()[DIFFUSERS_KEY])
    config = LoraConfig(**{name.removeprefix("transformer."): value for name, value in values.items()})
    assert (config.r, config.lora_alpha) == (RANK, ALPHA)
    whole = empty_transformer(source)
    inject_adapter_in_model(config, whole)

    def adapted(model: Any) -> list[str]:
        return [name for name, module in model.named_modules() if isinstance(module, LoraLayer)]

    assert adapted(whole) == adapted(skipped.model)
    assert set(adapted(whole)) == set(values["transformer.target_modules"])


def test_the_file_is_written_whole_with_its_names_and_header(source: ModelSource, tmp_path: Path) -> None:
    skipped = stubbed(source, SPLIT)
    parameters = adapt(source, skipped.model, SPLIT.middle(skipped.num_blocks))
    path = save(source, skipped.model, tmp_path)
    assert path == tmp_path / FILE_NAME
    tensors = load_file(path)
    assert tensors.keys() == {f"transformer.{name.replace('.default', '')}" for name in parameters}
    for name, value in parameters.items():
        found = tensors[f"transformer.{name.replace('.default', '')}"]
        assert found.dtype == torch.float32
        assert torch.equal(found, value)
    for name in tensors:
        assert not any(part in name for part in ("base_model", ".default", "_orig_mod", "module."))
    assert [file.name for file in tmp_path.iterdir()] == [FILE_NAME]
    lora = read_lora(path)
    assert lora.header["ss_steps"] == "7"
    names = layers(source, empty_transformer(source), SPLIT.middle(skipped.num_blocks))
    assert lora.scales == dict.fromkeys(sorted(names), ALPHA / RANK)


def test_the_same_adapter_is_the_same_bytes(tmp_path: Path) -> None:
    state = {"block.lora_A.weight": torch.randn(2, 3), "block.lora_B.weight": torch.randn(3, 2)}
    texts = {
        "prompt": 'a "photo" of\n\t sks \\ dog\x01\x7f',
        "emoji": "a 🐕, 犬 or dög",
        **{str(i): "x" * i for i in range(40)},
    }
    files = {save_lora(tmp_path / str(i), state, texts, write_atomically).read_bytes() for i in range(4)}
    assert len(files) == 1
    assert read_lora(tmp_path / "0" / FILE_NAME).header == {"format": "pt", **texts}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_never_written(tmp_path: Path, value: float) -> None:
    state = {"block.lora_A.weight": torch.ones(2, 3), "block.lora_B.weight": torch.tensor([[1.0, value]])}
    with pytest.raises(ValueError, match=r"not finite in transformer\.block\.lora_B\.weight"):
        save_lora(tmp_path, state, {}, write_atomically)
    assert list(tmp_path.iterdir()) == []


def test_a_lora_is_found_by_its_run_its_folder_or_itself(tmp_path: Path) -> None:
    state = {"block.lora_A.weight": torch.ones(2, 3), "block.lora_B.weight": torch.ones(3, 2)}
    path = save_lora(tmp_path / "run" / "adapter", state, {}, write_atomically)
    assert find_lora(tmp_path / "run") == find_lora(tmp_path / "run" / "adapter") == find_lora(path) == path
    path.rename(path.with_name("mine.safetensors"))
    assert find_lora(path.parent).name == "mine.safetensors"
    with pytest.raises(UserError, match="holds no LoRA"):
        find_lora(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    "tensors",
    [
        {"transformer.block.weight": torch.ones(2)},
        {"transformer.block.lora_A.weight": torch.ones(2, 3)},
        {"block.lora_A.weight": torch.ones(2, 3), "block.lora_B.weight": torch.ones(3, 2)},
        {"unet.block.lora_A.weight": torch.ones(2, 3), "unet.block.lora_B.weight": torch.ones(3, 2)},
    ],
)
def test_what_is_no_lora_of_a_transformer_is_told(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, tmp_path / "one.safetensors")
    with pytest.raises(UserError, match=r"--lora: .*one\.safetensors.* is not a LoRA in diffusers' format"):
        read_lora(tmp_path / "one.safetensors")


@pytest.mark.parametrize("text", ["{", "[]", '{"transformer.lora_alpha": "two"}', '{"transformer.alpha_pattern": 3}'])
def test_a_damaged_header_is_told(tmp_path: Path, text: str) -> None:
    state = {"block.lora_A.weight": torch.ones(2, 3), "block.lora_B.weight": torch.ones(3, 2)}
    save_lora(tmp_path, state, {DIFFUSERS_KEY: text}, write_atomically)
    with pytest.raises(UserError, match="damaged"):
        FrozenAdapters([str(tmp_path)])


def test_what_is_no_safetensors_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "one.safetensors").write_bytes(b"\x08\x00\x00\x00")
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        FrozenAdapters([str(tmp_path)])
