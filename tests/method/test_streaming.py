"""Streamed blocks: the resident model's loss and gradients, bit for bit, with the weights of one block in memory."""

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from blockskip.adapters.lora import add_lora, target_names
from blockskip.method.streaming import StreamedBlock, install_streamed
from tests.method.bases import BASES, Base, first, flux2

FRONT, TAIL = 1, 2


@pytest.fixture(scope="module", params=BASES, ids=lambda make: make.__name__)
def base(request: pytest.FixtureRequest) -> Base:
    torch.manual_seed(0)
    make: Callable[[], Base] = request.param
    return make()


@pytest.fixture(scope="module")
def joint() -> Base:
    """The base with both kinds of blocks, for what does not depend on the family."""
    torch.manual_seed(0)
    return flux2()


def middle(base: Base) -> range:
    return range(FRONT, base.layout.count(base.model) - TAIL)


def spans(base: Base) -> dict[str, range]:
    """What can be streamed, by name."""
    count = base.layout.count(base.model)
    return {"tail": range(count - TAIL, count), "middle": middle(base), "all": range(count)}


@dataclass
class Memory:
    """Gives copies of blocks' tensors, and knows how many bytes of them are alive.

    A tensor lies in the memory of an array; when the last view of it is gone, saved ones of autograd included, the
    array is.
    """

    states: dict[int, dict[str, torch.Tensor]]
    reads: list[int] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    alive: int = 0

    def __call__(self, index: int) -> dict[str, torch.Tensor]:
        self.reads.append(index)
        self.before.append(self.alive)
        return {name: self._copy(value) for name, value in self.states[index].items()}

    def _copy(self, value: torch.Tensor) -> torch.Tensor:
        array = value.numpy().copy()
        self.alive += array.nbytes
        weakref.finalize(array, self._gone, array.nbytes)
        return torch.from_numpy(array)

    def _gone(self, size: int) -> None:
        self.alive -= size


def streaming(base: Base, indices: range) -> tuple[nn.Module, Memory]:
    """A copy of the model with streamed blocks."""
    model = copy.deepcopy(base.model)
    blocks = {index: base.layout.blocks(model)[index] for index in indices}
    read = Memory({index: copy.deepcopy(block.state_dict()) for index, block in blocks.items()})
    install_streamed(model, base.layout, {index: block.to("meta") for index, block in blocks.items()}, read)
    return model, read


def adapt(base: Base, model: nn.Module, dropout: float = 0.0) -> dict[str, nn.Parameter]:
    """LoRA on the middle, none of it zero; by name."""
    names = target_names(model, base.layout, middle(base), base.targets, each=False)
    add_lora(model, names, 2, 4.0, dropout, seed=1)
    found = {name: value for name, value in sorted(model.named_parameters()) if value.requires_grad}
    draw = torch.Generator().manual_seed(5)
    for name, value in found.items():
        if ".lora_B." in name:
            value.data = 0.1 * torch.randn(value.shape, generator=draw)
    return found


def step(base: Base, model: nn.Module, found: dict[str, nn.Parameter]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of one pass in training mode; the same random numbers for dropout each time."""
    model.train()
    torch.manual_seed(9)
    loss = (first(model(**base.inputs)) - 1.0).square().mean()
    loss.backward()
    return loss.detach(), {name: value.grad for name, value in found.items() if value.grad is not None}


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("span", ["tail", "middle", "all"])
def test_loss_and_gradients_are_those_of_the_resident_model(base: Base, span: str, dropout: float) -> None:
    resident = copy.deepcopy(base.model)
    expected_loss, expected = step(base, resident, adapt(base, resident, dropout))
    model, read = streaming(base, spans(base)[span])
    loss, found = step(base, model, adapt(base, model, dropout))
    assert torch.equal(loss, expected_loss)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
        assert value.any(), name
    below = [index for index in spans(base)[span] if index < FRONT]  # nothing is trained before them
    assert read.reads == [*spans(base)[span], *(index for index in reversed(spans(base)[span]) if index not in below)]


@pytest.mark.parametrize("span", ["tail", "middle", "all"])
def test_one_block_s_weights_are_alive_at_a_time(base: Base, span: str) -> None:
    model, read = streaming(base, spans(base)[span])
    found = adapt(base, model)
    kept = tuple(f"{base.layout.names(model)[index]}." for index in spans(base)[span])
    in_memory = {name for name, value in model.named_parameters() if value.device.type != "meta"}
    assert in_memory == {name for name, _ in model.named_parameters() if not name.startswith(kept)} | found.keys()
    for _ in range(2):
        step(base, model, found)
    assert set(read.before) == {0}  # whenever a block is read, no byte of any other, nor of itself, is alive
    assert read.alive == 0
    with torch.no_grad():
        model(**base.inputs)
    assert set(read.before) == {0}
    assert read.alive == 0


def test_it_is_seen_when_a_block_is_kept(joint: Base) -> None:
    """The test above can fail."""
    model, read = streaming(joint, spans(joint)["tail"])
    held: list[dict[str, torch.Tensor]] = []
    for block in joint.layout.blocks(model):
        if isinstance(block, StreamedBlock):
            block._read = lambda index: held.append(read(index)) or held[-1]  # type: ignore[func-returns-value]
    step(joint, model, adapt(joint, model))
    assert max(read.before) > 0


def test_without_gradients_a_block_is_read_once(joint: Base) -> None:
    model, read = streaming(joint, spans(joint)["all"])
    with torch.no_grad():
        assert torch.equal(first(model(**joint.inputs)), joint.output())
    assert read.reads == list(spans(joint)["all"])


def test_under_gradient_checkpointing_a_block_is_read_twice_as_well(base: Base) -> None:
    resident = copy.deepcopy(base.model)
    resident.enable_gradient_checkpointing()  # Chroma's single blocks lose the attention mask then
    expected = step(base, resident, adapt(base, resident, 0.3))[1]
    model, read = streaming(base, spans(base)["tail"])
    found, runs = adapt(base, model, 0.3), []
    base.layout.blocks(model)[FRONT].register_forward_pre_hook(lambda *_: runs.append(1))
    model.enable_gradient_checkpointing()  # type: ignore[operator]
    gradients = step(base, model, found)[1]
    assert len(runs) == 2  # the blocks that are in memory are checkpointed
    assert len(read.reads) == 2 * TAIL
    assert set(read.before) == {0}
    for name, value in expected.items():
        assert torch.equal(gradients[name], value), name


def test_names_and_modes_are_the_block_s(joint: Base) -> None:
    model, _ = streaming(joint, spans(joint)["all"])
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in joint.model.named_parameters()]
    assert model.state_dict().keys() == joint.model.state_dict().keys()
    resident = copy.deepcopy(joint.model)
    assert adapt(joint, model).keys() == adapt(joint, resident).keys()
    assert [name for name, _ in model.named_modules()] == [name for name, _ in resident.named_modules()]
    for mode in (True, False):
        model.train(mode)
        for block in joint.layout.blocks(model):
            assert isinstance(block, StreamedBlock)
            assert {part.training for part in (block._block, *block.modules())} == {mode}  # type: ignore[union-attr]


def test_a_tensor_that_the_block_lacks_is_an_error(joint: Base) -> None:
    model, read = streaming(joint, spans(joint)["tail"])
    read.states[joint.layout.count(model) - 1]["other.weight"] = torch.zeros(1)
    with pytest.raises(KeyError, match=r"other\.weight"):
        model(**joint.inputs)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_step_runs_on_fake_tensors(joint: Base, dropout: float) -> None:
    """As the planner runs it: no values, no memory, and every trained tensor gets a gradient."""
    model, _ = streaming(joint, spans(joint)["all"])
    states = {index: block.state_dict() for index, block in enumerate(joint.layout.blocks(joint.model))}
    for block in joint.layout.blocks(model):
        assert isinstance(block, StreamedBlock)
        block._read = lambda index: {name: torch.empty(value.shape) for name, value in states[index].items()}
    found = adapt(joint, model, dropout)
    mode = FakeTensorMode()
    for name, value in list(model.named_parameters()):
        if value.device.type != "meta":
            layer, _, own = name.rpartition(".")
            fake = nn.Parameter(mode.from_tensor(value.detach()), requires_grad=name in found)
            setattr(model.get_submodule(layer), own, fake)
    inputs = {
        name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
        for name, value in joint.inputs.items()
    }
    model.train()
    with mode:
        first(model(**inputs)).square().mean().backward()
    for name, value in model.named_parameters():
        if name in found:
            assert value.grad is not None, name
            assert value.grad.shape == found[name].shape
