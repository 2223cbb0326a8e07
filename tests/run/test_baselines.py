"""The paper's baselines are settings of the one loop; plain LoRA among them is what anyone would write by hand."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel, SanaPipeline, SanaTransformer2DModel
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict

from blockskip.run import job
from blockskip.store.tensors import read_tensors
from blockskip.training import loop
from blockskip.training.step import MicroBatch
from tests.run.runs import PROMPT, Run, Runs

ALL = {"skip__front": 0, "skip__tail": 0}
PLAIN = ALL | {"data__resolution": 64, "patches__direction": "fixed"}
BASELINES: dict[str, dict[str, Any]] = {
    "plain LoRA": PLAIN,
    "resize only": ALL | {"patches__direction": "fixed"},
    "patches only": ALL,
    "no residual": {"skip__rule": "none"},
    "front only": {"skip__front": 2, "skip__tail": 0},
    "tail only": {"skip__front": 0, "skip__tail": 1},
    "high to low": {"patches__direction": "high-to-low"},
    "random patches": {"patches__direction": "random"},
    "skip, no patches": {"patches__direction": "fixed"},
    "front and tail kept": {"skip__front": 1, "skip__tail": 1, "skip__front_mode": "keep", "skip__tail_mode": "keep"},
    "a run inside": {"skip__middle": 2},
    "LoRA-FA": ALL | {"lora__freeze_a": True},
    "the method": {},
}


@dataclass
class Seen:
    """What a run drew and computed, before its first optimiser step changed anything."""

    batches: list[MicroBatch]
    start: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    loss: float


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Fills itself at the next run. ``lora_B`` starts at random values, so that ``lora_A`` has gradients at once."""
    found = Seen([], {}, {}, 0.0)
    add_lora, training_loss, clip = job.add_lora, loop.training_loss, torch.nn.utils.clip_grad_norm_

    def add(model: Any, *args: Any) -> list[torch.nn.Parameter]:
        parameters = add_lora(model, *args)
        draw = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for name, value in sorted(model.named_parameters()):
                if ".lora_B." in name:
                    value.copy_(0.1 * torch.randn(value.shape, generator=draw))
        found.start = {name: value.clone() for name, value in get_peft_model_state_dict(model).items()}
        found.model = model  # type: ignore[attr-defined]
        return parameters

    def watched_loss(model: Any, family: Any, config: Any, batch: MicroBatch, *args: Any) -> torch.Tensor:
        loss = training_loss(model, family, config, batch, *args)
        if not found.gradients:
            found.batches.append(batch)
            found.loss += float(loss.detach())
        return loss

    def watched_clip(parameters: Any, norm: float) -> torch.Tensor:
        if not found.gradients:
            model = found.model  # type: ignore[attr-defined]
            names = {value: name.replace(".default", "") for name, value in model.named_parameters()}
            found.gradients = {names[value]: value.grad.clone() for value in parameters}
            del found.model  # type: ignore[attr-defined]
        return clip(parameters, norm)

    monkeypatch.setattr(job, "add_lora", add)
    monkeypatch.setattr(loop, "training_loss", watched_loss)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", watched_clip)
    return found


@pytest.fixture(scope="module")
def trained(flux_runs: Runs) -> dict[str, tuple[Run, dict[str, torch.Tensor]]]:
    """A run of two steps of every baseline, and the adapter it started from."""
    add_lora, start = job.add_lora, {}

    def add(model: Any, *args: Any) -> list[torch.nn.Parameter]:
        parameters = add_lora(model, *args)
        start.update({f"transformer.{n}": v.clone() for n, v in get_peft_model_state_dict(model).items()})
        return parameters

    found = {}
    for name, changes in BASELINES.items():
        start.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(job, "add_lora", add)
            # Weight decay would move lora_A without any gradient.
            settings = {"train__steps": 2, "train__weight_decay": 0.0, "train__lr_warmup_steps": 0} | changes
            found[name] = flux_runs(**settings), dict(start)
    return found


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_trains_every_tensor(trained: dict[str, tuple[Run, dict[str, torch.Tensor]]], name: str) -> None:
    run, start = trained[name]
    tensors = run.tensors
    assert tensors.keys() == start.keys()
    frozen = [key for key in tensors if ".lora_A." in key] if run.config["lora"]["freeze_a"] else []
    assert [key for key, value in tensors.items() if torch.equal(value, start[key])] == frozen
    moments = read_tensors(run.output / "checkpoints" / "step-000002" / "state.safetensors")[0]
    assert sum(key.endswith(".exp_avg") for key in moments) == len(tensors) - len(frozen)
    blocks = {tuple(key.split(".")[1:3]) for key in tensors}
    skipped = run.header["blockskip.skipped"]
    if name == "a run inside":
        assert skipped == "1..2 of 4"
        assert blocks == {("transformer_blocks", "0"), ("single_transformer_blocks", "1")}
    else:
        front, _, rest = skipped.partition("+")
        assert len(blocks) == 4 - int(front) - int(rest.partition(" of ")[0])


def test_baselines_differ_where_they_should(trained: dict[str, tuple[Run, dict[str, torch.Tensor]]]) -> None:
    """At the first step the adapter is zero: what is given back for skipped blocks is what they would have computed."""
    losses = {name: [entry["loss"] for entry in run.entries] for name, (run, _) in trained.items()}
    first = {name: values[0] for name, values in losses.items()}
    assert first["front only"] == first["patches only"]
    assert losses["LoRA-FA"] == losses["patches only"]  # A has no gradient yet where B is zero: only step 2 moves it
    assert trained["LoRA-FA"][0].adapter != trained["patches only"][0].adapter
    assert first["front and tail kept"] == first["patches only"]
    assert first["tail only"] == pytest.approx(first["patches only"], rel=1e-6)
    assert first["a run inside"] == pytest.approx(first["patches only"], rel=1e-6)
    assert first["the method"] == pytest.approx(first["patches only"], rel=1e-6)
    assert first["skip, no patches"] == pytest.approx(first["resize only"], rel=1e-6)
    assert first["no residual"] != pytest.approx(first["the method"], rel=1e-2)
    second = [values[1] for values in losses.values()]
    assert len(set(second)) == len(BASELINES) - 1, losses


def adapted(model: Any, start: dict[str, torch.Tensor], rank: int, alpha: float) -> Any:
    """The model with LoRA where the state has it, by PEFT alone."""
    layers = [name.removesuffix(".lora_A.weight") for name in start if name.endswith(".lora_A.weight")]
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=rank, lora_alpha=alpha, target_modules=layers))
    set_peft_model_state_dict(model, start)
    return model


def flux_loss(folder: Any, start: dict[str, torch.Tensor], batch: MicroBatch) -> tuple[Any, torch.Tensor]:
    """Flow matching as FLUX's DreamBooth script has it, on packed latents."""
    pipeline = FluxPipeline.from_pretrained(folder)
    prompt, pooled, text_ids = pipeline.encode_prompt(PROMPT, None, max_sequence_length=12)
    model = adapted(FluxTransformer2DModel.from_pretrained(folder / "transformer"), start, 4, 8.0)
    count, channels, height, width = batch.latents.shape
    sigma = batch.sigma.view(-1, 1, 1, 1)
    noised = (1 - sigma) * batch.latents + sigma * batch.noise
    size = (count, channels, height, width)
    ids = pipeline._prepare_latent_image_ids(count, height // 2, width // 2, "cpu", torch.float32)
    predicted = model(
        hidden_states=pipeline._pack_latents(noised, *size), timestep=batch.sigma, guidance=None,
        pooled_projections=pooled.expand(count, -1), encoder_hidden_states=prompt.expand(count, -1, -1),
        txt_ids=text_ids, img_ids=ids,
    ).sample  # fmt: skip
    target = pipeline._pack_latents(batch.noise - batch.latents, *size)
    return model, ((predicted - target) ** 2).mean()


def sana_loss(folder: Any, start: dict[str, torch.Tensor], batch: MicroBatch) -> tuple[Any, torch.Tensor]:
    """Flow matching as SANA's DreamBooth script has it."""
    pipeline = SanaPipeline.from_pretrained(folder)
    prompt, mask, _, _ = pipeline.encode_prompt(
        PROMPT, do_classifier_free_guidance=False, max_sequence_length=12, complex_human_instruction=None
    )
    model = adapted(SanaTransformer2DModel.from_pretrained(folder / "transformer"), start, 4, 8.0)
    count, sigma = batch.latents.shape[0], batch.sigma.view(-1, 1, 1, 1)
    predicted = model(
        hidden_states=(1.0 - sigma) * batch.latents + sigma * batch.noise, timestep=batch.sigma * 1000,
        encoder_hidden_states=prompt.expand(count, -1, -1), encoder_attention_mask=mask.expand(count, -1),
    ).sample  # fmt: skip
    return model, ((predicted - (batch.noise - batch.latents)) ** 2).mean()


@pytest.mark.parametrize("reference", [flux_loss, sana_loss])
def test_plain_lora_is_what_one_would_write(
    request: pytest.FixtureRequest, seen: Seen, reference: Callable[..., Any]
) -> None:
    """Loss and every gradient of the first step: two micro-batches of two pictures, whole models, other code."""
    runs: Runs = request.getfixturevalue(reference.__name__.replace("loss", "runs"))
    runs(**PLAIN, train__steps=1, train__batch_size=2, lora__dropout=0.0, lora__lora_alpha=8.0)
    assert len(seen.batches) == 2
    total, gradients = 0.0, dict.fromkeys(seen.gradients, torch.zeros(()))
    for batch in seen.batches:
        assert batch.latents.shape[0] == 2
        model, loss = reference(runs.model, seen.start, batch)
        (loss / 2).backward()
        total += float(loss.detach())
        for name, value in model.named_parameters():
            if value.requires_grad:
                assert value.grad is not None
                gradients[name.replace(".default", "")] = gradients[name.replace(".default", "")] + value.grad
    assert total == pytest.approx(seen.loss, rel=1e-6)
    assert gradients.keys() == seen.gradients.keys()
    for name, value in seen.gradients.items():
        assert float(value.norm()) > 0, name
        assert float((gradients[name] - value).norm()) <= 1e-5 * float(value.norm()), name


def test_a_front_alone_loses_nothing(flux_runs: Runs, seen: Seen) -> None:
    """With the front skipped, loss and gradients are those of the same adapter on the whole model, bit for bit."""
    targets = {"lora__targets": ["attn.to_q", "attn.to_v"], "lora__dropout": 0.0, "train__steps": 1}
    flux_runs(**targets, skip__front=3, skip__tail=0)
    skipped = Seen(seen.batches, seen.start, seen.gradients, seen.loss)
    assert all(batch.features for batch in skipped.batches)
    seen.batches, seen.gradients, seen.loss = [], {}, 0.0
    # The whole model with an adapter on all its blocks, which is zero but for the last.
    original = job.add_lora

    def add(model: Any, *args: Any) -> list[torch.nn.Parameter]:
        parameters = original(model, *args)
        state = get_peft_model_state_dict(model)
        start = {n: skipped.start.get(n, torch.zeros_like(v)) for n, v in state.items()}
        set_peft_model_state_dict(model, start)
        return parameters

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "add_lora", add)
        flux_runs(**targets, **ALL)
    assert not any(batch.features for batch in seen.batches)
    assert seen.loss == skipped.loss
    assert len(skipped.gradients) == 4
    for name, value in skipped.gradients.items():
        assert torch.equal(seen.gradients[name], value), name
