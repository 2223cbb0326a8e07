"""`patches.positions = "picture"`: a patch's tokens have the positions at which they lie in their picture."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

from blockskip.config import Config, PatchesConfig
from blockskip.errors import UserError
from blockskip.families import FAMILIES, Family
from blockskip.families.packing import grid_ids, positions_at
from blockskip.loading.resolved import check_positions
from blockskip.loading.source import ModelSource
from blockskip.loading.streaming import stream_blocks
from blockskip.method.skipping import ConstantResidual, SkippedModel
from blockskip.method.split import Split
from blockskip.precision import compute
from blockskip.training.step import MicroBatch
from tests.families.groups import (
    CPU,
    GRID,
    adapt,
    capture_features,
    distance,
    forward_inputs,
    group,
    loss_of,
    transformer,
)
from tests.method.bases import first

ROWS, COLUMNS = GRID
PLACING = [family.name for family in FAMILIES if family.takes_positions]
#: Of two patches in their pictures' tokens: one whole, one at half the density from the middle of a token on.
PLACES = ((0.0, 0.0, float(COLUMNS), float(ROWS)), (2.5, 1.0, 2.0 * COLUMNS, 2.0 * ROWS))
OTHERS = ((2.5, 1.0, 2.0 * COLUMNS, 2.0 * ROWS), (0.0, 3.0, float(COLUMNS), float(ROWS)))

tokens = st.integers(1, 96)


@pytest.fixture(params=PLACING)
def placing(request: pytest.FixtureRequest) -> ModelSource:
    """The families whose forward takes positions, one after the other."""
    found: ModelSource = request.getfixturevalue(request.param)
    return found


def placed(batch: MicroBatch, places: Any) -> MicroBatch:
    return dataclasses.replace(batch, places=torch.tensor(places, dtype=torch.float32))


def alone(batch: MicroBatch, row: int) -> MicroBatch:
    """One sample of a batch."""
    rows = {name: value[row : row + 1] for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    return dataclasses.replace(batch, **rows, text={name: value[row : row + 1] for name, value in batch.text.items()})


def ids_of(source: ModelSource, inputs: dict[str, Any], batch: int) -> torch.Tensor:
    """Rows and columns (B, tokens, 2) that the transformer is given for the image tokens."""
    ids = inputs["img_ids"]
    if ids.ndim == 2:
        ids = ids.reshape(len(ids), batch, -1).transpose(0, 1)
    assert all(bool((ids[..., axis] == ids[0, 0, axis]).all()) for axis in range(ids.shape[-1]) if axis not in (1, 2))
    found: torch.Tensor = ids[..., 1:3]
    return found


@given(tokens, tokens)
def test_a_whole_picture_has_the_plain_positions(rows: int, columns: int) -> None:
    """Bit for bit."""
    found = positions_at(torch.tensor([[0.0, 0.0, columns, rows]]), rows, columns)
    assert torch.equal(found[0], grid_ids(rows, columns, 3, CPU)[:, 1:])


@given(tokens, tokens, st.data())
def test_a_window_of_the_pictures_own_tokens_has_their_positions(rows: int, columns: int, data: st.DataObject) -> None:
    height, width = data.draw(st.integers(1, rows)), data.draw(st.integers(1, columns))
    top, left = data.draw(st.integers(0, rows - height)), data.draw(st.integers(0, columns - width))
    whole = grid_ids(rows, columns, 3, CPU)[:, 1:].reshape(rows, columns, 2)
    found = positions_at(torch.tensor([[left, top, width, height]], dtype=torch.float32), height, width)
    assert torch.equal(found[0], whole[top : top + height, left : left + width].reshape(-1, 2))


def test_a_token_of_a_resized_patch_lies_at_the_middle_of_what_it_shows() -> None:
    """Four tokens a side for 8 of the picture: each stands for two, and lies between them."""
    found = positions_at(torch.tensor([[3.0, 1.5, 8.0, 8.0]]), 4, 4).reshape(4, 4, 2)
    assert found[:, 0, 0].tolist() == [2.0, 4.0, 6.0, 8.0]
    assert found[0, :, 1].tolist() == [3.5, 5.5, 7.5, 9.5]
    assert torch.equal(found[..., 0], found[:, :1, 0].expand(4, 4))
    assert torch.equal(found[..., 1], found[:1, :, 1].expand(4, 4))


def test_a_patch_that_is_not_square() -> None:
    found = positions_at(torch.tensor([[0.0, 0.0, 9.0, 4.0], [1.0, 2.0, 6.0, 4.0]]), 2, 3).reshape(2, 2, 3, 2)
    assert found[0, :, 0, 0].tolist() == [0.5, 2.5]
    assert found[0, 0, :, 1].tolist() == [1.0, 4.0, 7.0]
    assert found[1, :, 0, 0].tolist() == [2.5, 4.5]
    assert found[1, 0, :, 1].tolist() == [1.5, 3.5, 5.5]


@pytest.mark.parametrize("grid", [GRID, (8, 12)])  # of which HiDream fills the second
def test_whole_pictures_are_trained_as_without_it(placing: ModelSource, grid: tuple[int, int]) -> None:
    """The same ids and, of one sample, the same output, bit for bit."""
    whole = [(0.0, 0.0, float(grid[1]), float(grid[0]))]
    batch = group(placing, 1, grid=grid)
    plain, given = forward_inputs(placing, batch), forward_inputs(placing, placed(batch, whole))
    assert plain.keys() == given.keys()
    for name in ("img_ids", "txt_ids"):
        if name in plain:
            assert given[name].dtype == plain[name].dtype
            assert torch.equal(given[name], plain[name])
    model = transformer(placing)
    with torch.no_grad():
        assert torch.equal(first(model(**given)), first(model(**plain)))
    pair = group(placing, grid=grid)
    given, plain = forward_inputs(placing, placed(pair, whole * 2)), forward_inputs(placing, pair)
    expected = plain["img_ids"] if plain["img_ids"].ndim == 3 else plain["img_ids"][None].expand(2, -1, -1)
    assert torch.equal(ids_of(placing, given, 2), expected[..., 1:3])


@pytest.mark.parametrize("offset", [(0, 0), (4, 6), (3, 5)])
def test_a_window_has_the_ids_of_the_whole_picture_there(placing: ModelSource, offset: tuple[int, int]) -> None:
    """A patch of half the side, of as many tokens as it covers, alone and beside another one."""
    top, left = offset
    whole = forward_inputs(placing, group(placing, 1, grid=(2 * ROWS, 2 * COLUMNS)))
    grid = ids_of(placing, whole, 1)[0, : 4 * ROWS * COLUMNS].reshape(2 * ROWS, 2 * COLUMNS, 2)
    expected = grid[top : top + ROWS, left : left + COLUMNS].reshape(-1, 2)
    place = (float(left), float(top), float(COLUMNS), float(ROWS))
    one = forward_inputs(placing, placed(group(placing, 1), [place]))
    assert torch.equal(ids_of(placing, one, 1)[0, : ROWS * COLUMNS], expected)
    two = forward_inputs(placing, placed(group(placing), [PLACES[1], place]))
    assert torch.equal(ids_of(placing, two, 2)[1, : ROWS * COLUMNS], expected)
    assert not torch.equal(ids_of(placing, two, 2)[0, : ROWS * COLUMNS], expected)


def test_text_keeps_its_ids(placing: ModelSource) -> None:
    plain, given = forward_inputs(placing, group(placing)), forward_inputs(placing, placed(group(placing), PLACES))
    if "txt_ids" in plain:  # else the model makes them
        for ids in given["txt_ids"].chunk(2, dim=1):
            assert torch.equal(ids, plain["txt_ids"])


def test_each_sample_of_a_batch_has_its_own_place(placing: ModelSource) -> None:
    """Together they give what each gives alone; with the places of others they give something else."""
    model, batch = transformer(placing), placed(group(placing), PLACES)
    with torch.no_grad():
        together = first(model(**forward_inputs(placing, batch)))
        for row in range(2):
            assert distance(together[row : row + 1], first(model(**forward_inputs(placing, alone(batch, row))))) < 1e-6
        others = first(model(**forward_inputs(placing, placed(batch, OTHERS))))
        plain = first(model(**forward_inputs(placing, dataclasses.replace(batch, places=None))))
    assert all(distance(others[row], together[row]) > 1e-4 for row in range(2))
    assert distance(plain[0], together[0]) < 1e-6 and distance(plain[1], together[1]) > 1e-4


@pytest.mark.parametrize("way", ["as it is", "checkpointed", "streamed"])
def test_the_step_is_that_of_the_whole_model(placing: ModelSource, way: str) -> None:
    """A stored front is exact with places too: the same gradients, checkpointed and streamed as well."""
    split, batch = Split(2, 0), placed(group(placing), PLACES)
    whole = transformer(placing)
    count = placing.family.layout.count(whole)
    features = capture_features(placing, whole, split, batch)
    middle = list(split.middle(count))
    expected = adapt(placing, whole, middle)
    none = SkippedModel(whole, placing.family.layout, Split(0, 0), ConstantResidual())
    loss_of(placing, none, batch).backward()
    model = transformer(placing, range(2) if way != "streamed" else range(count))
    if way == "streamed":
        stream_blocks(model, placing, middle, torch.float32, CPU)
    found = adapt(placing, model, middle)
    if way == "checkpointed":
        placing.family.enable_checkpointing(model)
        model.train()
    skipped = SkippedModel(model, placing.family.layout, split, ConstantResidual())
    loss_of(placing, skipped, dataclasses.replace(batch, features=features)).backward()
    for name, value in expected.items():
        if value.grad is not None:
            assert torch.equal(found[name].grad, value.grad), name


def test_positions_are_not_rounded_in_bfloat16(placing: ModelSource) -> None:
    """Whole numbers up to 256 would stand it; what lies between them would not."""
    model = transformer(placing, dtype=torch.bfloat16)
    embedder = getattr(model, "pos_embed", None) or model.pe_embedder
    ids = forward_inputs(placing, placed(group(placing, 1), [(33.3, 60.1, 7.7, 5.5)]), torch.bfloat16)["img_ids"]
    expected = embedder(ids)
    with compute(CPU, torch.bfloat16):
        found = embedder(ids)
    rounded = embedder(ids.bfloat16().float())
    for name, value in {"found": found, "rounded": rounded}.items():
        pairs = zip(tree_leaves(value), tree_leaves(expected), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs) == (name == "found")


def test_a_family_takes_positions_that_can_place_them() -> None:
    for family in FAMILIES:
        assert family.takes_positions == (type(family).placed is not Family.placed), family.name
    flux_like = {"flux", "chroma", "longcat_image", "ovis_image", "bria"}
    assert flux_like | {"flux2", "flux2_klein", "hidream"} == set(PLACING)


def test_other_families_are_refused_in_a_sentence(source: ModelSource) -> None:
    check_positions(Config(), source)
    config = Config(patches=PatchesConfig(positions="picture"))
    if source.family.takes_positions:
        check_positions(config, source)
        return
    with pytest.raises(UserError) as caught:
        check_positions(config, source)
    (problem,) = caught.value.problems
    assert problem == (
        'patches.positions = "picture" needs a model that is given the positions of its tokens '
        f'({", ".join(PLACING)}); {source.family.name} is not: leave it at "patch".'
    )
    assert caught.value.exit_code == 2
    with pytest.raises(NotImplementedError, match=source.family.name):
        forward_inputs(source, placed(group(source), PLACES))
