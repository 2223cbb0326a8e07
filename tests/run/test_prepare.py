"""What is known of a run before any weights are read."""

from pathlib import Path
from typing import Any

import pytest
import torch

from blockskip.errors import UserError
from blockskip.loading.transformer import empty_transformer
from blockskip.run import Prepared, prepare
from blockskip.settings import from_flat, to_flat, to_toml
from tests.run.loads import Loads
from tests.run.runs import PROMPT


@pytest.fixture
def values(flux_folder: Path, photos: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "model.path": str(flux_folder), "data.images": str(photos), "data.prompt": PROMPT,
        "output": str(tmp_path / "out"), "train.steps": 5,
    }  # fmt: skip


def ready(values: dict[str, Any], **changes: Any) -> Prepared:
    config = from_flat(values | {name.replace("__", "."): value for name, value in changes.items()})
    with Loads() as loads:
        prepared = prepare(config)
    assert loads.names == []
    assert not prepared.output.exists()
    return prepared


def test_defaults_are_filled_in(values: dict[str, Any]) -> None:
    """Those of the family, as the paper and its diffusers script have them."""
    prepared = ready(values)
    flat = to_flat(prepared.config)
    expected = {
        "data.full_resolution": 512, "data.resolution": 256, "data.text_length": 512, "sigma.distribution": "uniform",
        "sigma.shift": 1.0, "lora.lora_alpha": 16.0, "train.guidance_scale": 1.0,
    }  # fmt: skip
    assert {name: flat[name] for name in expected} == expected
    assert type(flat["lora.lora_alpha"]) is float
    assert (prepared.split.front, prepared.split.tail, prepared.num_blocks) == (3, 1, 8)
    assert prepared.dtype == torch.float32 or torch.cuda.is_available()
    assert len(prepared.schedule.groups) == 20


def test_what_was_resolved_is_resolved_to_itself(values: dict[str, Any]) -> None:
    """A run's ``config.toml`` gives the same run: also its fingerprint is the same."""
    first = ready(values)
    again = ready(to_flat(first.config))
    assert to_toml(again.config) == to_toml(first.config)
    assert again.fingerprint() == first.fingerprint()
    explicit = ready(values, lora__lora_alpha=16, train__guidance_scale=1)
    assert explicit.fingerprint() == first.fingerprint()


def test_every_setting_is_taken_as_it_is(values: dict[str, Any]) -> None:
    assert ready(values, train__guidance_scale=0.0).guidance == 0.0
    assert ready(values, data__resolution=1024).config.data.full_resolution == 1024
    assert ready(values, data__full_resolution=200).config.data.resolution == 96
    assert ready(values, features__disk="2kB").disk_bytes == 2000
    assert ready(values).disk_bytes is None
    assert ready(values, model__dtype="bfloat16").dtype == torch.bfloat16
    assert ready(values, skip__front=2).split.tail == 0
    assert ready(values, skip__tail=2).split.front == 0


def test_targets_and_counts(values: dict[str, Any]) -> None:
    prepared = ready(values, lora__rank=3, lora__targets=["attn.to_q", "proj_mlp"])
    assert prepared.targets == [
        f"single_transformer_blocks.{block}.{layer}" for block in range(4) for layer in ("proj_mlp", "attn.to_q")
    ]  # in the model's own order
    model = empty_transformer(prepared.source)
    total = sum(value.numel() for value in model.parameters())
    skipped = [*model.transformer_blocks, model.single_transformer_blocks[4]]  # type: ignore[misc, index]
    assert prepared.counts.skipped == sum(value.numel() for block in skipped for value in block.parameters())
    assert prepared.counts.kept == total - prepared.counts.skipped
    assert prepared.counts.trained == 4 * 3 * (32 + 32 + 32 + 128)
    frozen = ready(values, lora__rank=3, lora__targets=["attn.to_q", "proj_mlp"], lora__freeze_a=True)
    assert frozen.counts.trained == 4 * 3 * (32 + 128)


def test_targets_of_ones_own_must_all_match(values: dict[str, Any]) -> None:
    """The family's own list has names of both kinds of blocks; a user's list is taken at its word."""
    assert not any("add_q_proj" in name for name in ready(values).targets)  # only single blocks are trained
    with pytest.raises(UserError, match=r'"attn\.add_q_proj" matches no linear layer of the 4 trained blocks'):
        ready(values, lora__targets=["attn.to_q", "attn.add_q_proj"])
    assert ready(values, skip__front=2, lora__targets=["attn.to_q", "attn.add_q_proj"]).targets


def test_the_fingerprint_has_what_was_learnt_with(values: dict[str, Any]) -> None:
    first = ready(values).fingerprint()

    def differs(**changes: Any) -> set[str]:
        other = ready(values, **changes).fingerprint()
        return {name for name in first if other[name] != first[name]}

    assert differs(train__steps=7, train__learning_rate=1.0, preview__prompts=["x"], features__disk="1GB") == set()
    assert differs(lora__rank=8) == {"lora.rank", "lora.lora_alpha"}
    assert differs(lora__freeze_a=True) == {"lora.freeze_a"}
    assert differs(data__flip=True) == {"data.flip"}
    assert differs(data__prompt="x") == {"data.prompt", "the pictures and captions"}
    for name, value in (("train__seed", 2), ("train__batch_size", 2), ("features__pool", 7)):
        assert differs(**{name: value}) == {name.replace("__", ".")}


def test_a_preview_of_a_wrong_size_is_told_by_its_key(values: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"preview\.height = 30 is no multiple of 8; take 32"):
        prepare(from_flat({**values, "preview.prompts": ["x"], "preview.height": 30}))


def test_steps_of_previews_that_the_sampler_cannot_take_are_told(
    values: dict[str, Any], qwen_image_folder: Path
) -> None:
    with pytest.raises(
        UserError, match=r"^preview\.num_inference_steps = 1 is too few for this model's sampler; take 2 o"
    ):
        ready(
            values | {"model.path": str(qwen_image_folder)}, preview__prompts=["a dog"], preview__num_inference_steps=1
        )
