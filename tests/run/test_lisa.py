"""LISA: random blocks with their full weights, period after period, in the one training loop."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import blockskip
from blockskip.adapters.frozen import FrozenAdapters
from blockskip.errors import RunError, UserError
from blockskip.loading.source import open_model
from blockskip.loading.transformer import StreamedTransformer, load_transformer
from blockskip.planner.lisa import block_sizes, changed_bytes
from blockskip.planner.make import make_plan
from blockskip.run import job
from blockskip.run.planned import setting_of
from blockskip.store.tensors import read_tensors
from blockskip.training.lisa import blocks_until
from tests.run.runs import Run, Runs
from tests.run.test_resume import SIX, Stop, stop_at

CPU = torch.device("cpu")
# Of 4 blocks, 2, 0 and 1 in turn. Weight decay would move weights without any gradient.
LISA = {
    "train__seed": 4, "skip__ratio": 0.0, "train__lisa_blocks": 1, "train__lisa_period": 2, "train__weight_decay": 0.0,
    "train__lr_warmup_steps": 0, "train__learning_rate": 1e-3,
}  # fmt: skip
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def difference(run: Run) -> dict[str, torch.Tensor]:
    tensors = load_file(run.output / "adapter" / "weights_difference.safetensors")
    return {name.removeprefix("transformer."): value for name, value in tensors.items()}


def blocks(names: Any) -> set[str]:
    return {".".join(name.split(".")[:2]) for name in names}


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_every_tensor_of_its_blocks_moves_and_no_other(runs: Runs, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is saved, loaded whole or block by block, is the model that was trained."""
    models: list[torch.nn.Module] = []
    load = job.load_transformer

    def watched(*args: Any) -> torch.nn.Module:
        models.append(load(*args))
        return models[-1]

    monkeypatch.setattr(job, "load_transformer", watched)
    run = runs(**LISA, model__dtype=dtype, train__checkpoint_every=2)
    (trained,) = models
    source = open_model(str(runs.model))
    names, kind = source.family.layout.names(trained), PRECISIONS[dtype]
    first, second = ({names[index] for index in one} for one in blocks_until(4, 4, 2, len(names), 1))
    assert first != second
    changes = difference(run)
    assert blocks(changes) == first | second
    assert all(value.dtype == torch.float32 and value.any() for value in changes.values())
    own = dict(trained.named_parameters())
    assert set(changes) == {name for name in own if blocks([name]) <= first | second}
    base = dict(load_transformer(source, [], kind, CPU).named_parameters())
    assert {name for name, value in own.items() if not torch.equal(value, base[name])} <= set(changes)

    states = {
        step: read_tensors(run.output / "checkpoints" / f"step-{step:06d}" / "state.safetensors")[0] for step in (2, 4)
    }
    kept = {step: [name for name in state if name.startswith("adapter.")] for step, state in states.items()}
    assert blocks(name.removeprefix("adapter.") for name in kept[2]) == first
    for name in kept[2]:  # frozen again in the second period
        assert blocks([name.removeprefix("adapter.")]) == second or torch.equal(states[4][name], states[2][name])
    for state in states.values():  # a fresh optimiser every period, of its own blocks alone
        assert {int(value) for name, value in state.items() if name.endswith(".step")} == {2}
    moments = {step: sum(name.endswith(".exp_avg") for name in state) for step, state in states.items()}
    assert moments == {
        step: len([name for name in own if blocks([name]) == block]) for step, block in ((2, first), (4, second))
    }

    adapters = FrozenAdapters([str(run.output)])
    adapters.check(load_transformer(source, [], kind, CPU), "lora")
    loaded = dict(load_transformer(source, [], kind, CPU, adapters).named_parameters())
    streamed = StreamedTransformer(source, kind, CPU, adapters)
    for index, name in enumerate(names):
        with streamed.block(index) as block:
            loaded |= {f"streamed {name}.{key}": value.detach() for key, value in block.named_parameters()}
    for name, value in loaded.items():
        expected = own[name.removeprefix("streamed ")]
        assert value.dtype == expected.dtype
        assert torch.allclose(value, expected, rtol=1e-6, atol=1e-8), name
        assert kind == torch.float32 or torch.equal(value, expected), name


def test_masters_are_float32(flux_runs: Runs) -> None:
    """Steps that are too small for bfloat16 add up."""
    run = flux_runs(**LISA, model__dtype="bfloat16")
    state = read_tensors(run.output / "checkpoints" / "step-000004" / "state.safetensors")[0]
    weights = {name: value for name, value in state.items() if name.startswith("adapter.")}
    assert {value.dtype for value in weights.values()} == {torch.float32}
    assert all(not torch.equal(value, value.bfloat16().float()) for value in weights.values())


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("period", [2, 3], ids=["inside a period", "at its end"])
def test_three_and_three_are_six(runs: Runs, monkeypatch: pytest.MonkeyPatch, period: int, dtype: str) -> None:
    settings = {**SIX, **LISA, "train__seed": 11, "train__lisa_period": period, "model__dtype": dtype}
    assert blocks_until(11, 6, 2, 4, 1) == [(3,), (0,), (3,)]  # one comes again
    straight, output = runs(**settings), runs.folder()
    stop_at(monkeypatch, 10, Stop())
    with pytest.raises(Stop):
        runs(output, **settings)
    with pytest.raises(UserError, match=r"another train\.lisa_blocks"):
        runs(output, **settings | {"train__lisa_blocks": 2})
    again = runs(output, **settings)
    assert again.metrics == straight.metrics
    assert again.state(6)["state.safetensors"] == straight.state(6)["state.safetensors"]
    name = Path("adapter") / "weights_difference.safetensors"
    assert (again.output / name).read_bytes() == (straight.output / name).read_bytes()


def test_it_is_drawn_with(flux_runs: Runs) -> None:
    """Previews on the way and at the end, and `generate` of its folder, show what was learnt."""
    size = {"height": 32, "width": 32, "num_inference_steps": 2}
    given = {f"preview__{name}": value for name, value in size.items()}
    run = flux_runs(**LISA | {"train__learning_rate": 1e-2}, preview__prompts=["x"], preview__every=2, **given)
    assert run.result is not None
    assert run.result.adapter == run.output / "adapter" / "weights_difference.safetensors"
    last = run.result.samples[0][0]
    early = run.output / "samples" / "step-000002-00-0.png"
    assert early.is_file() and early.read_bytes() != (run.output / "samples" / "step-000004-00-0.png").read_bytes()
    whole = blockskip.generate("x", run.output, **size)[0]
    base = blockskip.generate("x", model=str(flux_runs.model), **size)[0]
    half = blockskip.generate("x", run.output, lora_scale=0.5, **size)[0]
    pictures = {picture.tobytes() for picture in (whole, base, half)}
    assert len(pictures) == 3
    assert last.size == whole.size


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"skip__ratio": 0.5}, r"train\.lisa_blocks chooses from all blocks of the model: set skip\.ratio to 0"),
        ({"skip__middle": 1}, r"train\.lisa_blocks chooses from all blocks"),
        ({"train__lisa_blocks": 5}, r"train\.lisa_blocks = 5 is more than the 4 blocks"),
        (
            {"model__quantization": "nf4"},
            r"train\.lisa_blocks trains the weights themselves; leave model\.quantization",
        ),
        ({"train__stream_middle": True}, r"train\.stream_middle keeps them in the file"),
        ({"lora__freeze_a": True}, r"without LoRA; leave lora\.freeze_a and lora\.targets out"),
    ],
)
def test_what_makes_no_sense_is_told(flux_runs: Runs, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        flux_runs.prepared(flux_runs.folder(), **LISA | settings)


def test_changed_weights_are_told_from_lora(flux_runs: Runs) -> None:
    run = flux_runs.once(**LISA)
    with safe_open(run.output / "adapter" / "weights_difference.safetensors", framework="pt") as stored:
        header = stored.metadata()
    assert header["blockskip.kind"] == "weights_difference"
    assert header["modelspec.architecture"] == "flux/weights_difference"
    assert not any("lora" in name or "network" in name for name in header)
    with pytest.raises(UserError, match="only LoRA files can belong to the base of a run"):
        flux_runs.prepared(flux_runs.folder(), model__base_adapters=[str(run.output)])


def test_it_is_planned(flux_runs: Runs) -> None:
    """The plan knows the blocks of every period, and so what the adapter's file holds at the end."""
    run = flux_runs(**LISA, planned=True)
    assert run.result is not None
    assert set(run.result.planned) == {"encode text", "encode pictures", "train"}
    setting = setting_of(run.result.prepared)
    assert changed_bytes(setting) == sum(value.nbytes for value in difference(run).values())
    assert run.result.prepared.counts.trained == max(block_sizes(setting))
    on_cuda = make_plan(dataclasses.replace(setting, device=torch.device("cuda")), remember=False)
    assert on_cuda.phases["preview"].host["adapter"] == changed_bytes(setting)
    assert on_cuda.phases["save"].disk_bytes > 3 * changed_bytes(setting)


def test_training_that_changes_nothing_is_an_error(flux_runs: Runs) -> None:
    output = flux_runs.folder()
    with pytest.raises(RunError, match="changed nothing: every weight is as it was"):
        flux_runs(output, **LISA | {"train__learning_rate": 1e-60, "train__steps": 1})
    assert not (output / "adapter" / "weights_difference.safetensors").exists()
