"""Which blocks LISA trains when, and the float32 masters of their weights."""

import pytest
import torch

from blockskip.loading.source import ModelSource
from blockskip.training.lisa import LisaBlocks, blocks_of, blocks_until
from tests.families.groups import forward_inputs, group, transformer


def test_a_period_s_blocks_depend_on_seed_and_period_alone() -> None:
    drawn = [blocks_of(seed, period, 12, 3) for seed in range(3) for period in range(20)]
    assert drawn == [blocks_of(seed, period, 12, 3) for seed in range(3) for period in range(20)]
    assert all(len(set(one)) == 3 and one == tuple(sorted(one)) and set(one) <= set(range(12)) for one in drawn)
    assert len(set(drawn)) > 40
    assert {index for one in drawn for index in one} == set(range(12))
    assert blocks_until(0, 101, 50, 12, 3) == drawn[:3]
    assert blocks_until(0, 100, 50, 12, 3) == drawn[:2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_period_s_blocks_are_unfrozen(source: ModelSource, dtype: torch.dtype) -> None:
    """Gradients of two passes add up in float32, at the masters alone."""
    model = transformer(source, dtype=dtype)
    layout = source.family.layout
    names, blocks = layout.names(model), LisaBlocks(model, layout, 2, 3, 5)
    for step, begins in ((4, True), (5, False), (6, True)):
        assert blocks.begin(step) == begins
        chosen = {names[index] for index in blocks_of(5, step // 3, len(names), 2)}
        trained = {name for name, value in model.named_parameters() if value.requires_grad}
        assert {".".join(name.split(".")[:2]) for name in trained} == chosen
        assert set(blocks.pairs) == trained
        assert {value.dtype for value in blocks.parameters} == {torch.float32}
    inputs, sums = forward_inputs(source, group(source), dtype), []
    for count in (1, 2):
        for _ in range(count):
            with torch.autocast("cpu", torch.bfloat16, dtype == torch.bfloat16):
                model(**inputs)[0].float().square().mean().backward()
        sums.append({name: m.grad for name, (_, m) in blocks.pairs.items() if m.grad is not None})
        for parameter, master in blocks.pairs.values():
            assert parameter.grad is None or parameter is master
            master.grad = None
    assert sums[0].keys() == sums[1].keys() and len(sums[0]) > len(trained) // 2
    for name, value in sums[0].items():
        assert value.dtype == torch.float32
        assert torch.allclose(sums[1][name], 2 * value, rtol=1e-6), name


def test_weights_of_other_blocks_are_refused(flux: ModelSource) -> None:
    model = transformer(flux)
    blocks = LisaBlocks(model, flux.family.layout, 1, 1, 0)
    blocks.begin(0)
    state = blocks.state()
    for wrong in (dict(list(state.items())[1:]), state | {"other.weight": torch.ones(1)}):
        with pytest.raises(ValueError, match="not of this model's blocks"):
            LisaBlocks(model, flux.family.layout, 1, 1, 0).load(wrong)
    fresh = transformer(flux)
    loaded = LisaBlocks(fresh, flux.family.layout, 1, 1, 0)
    loaded.load({name: value + 1 for name, value in state.items()})
    assert all(torch.equal(value, state[name] + 1) for name, value in loaded.state().items())
    assert torch.equal(fresh.get_parameter(next(iter(state))), next(iter(state.values())) + 1)
