"""Features made block by block, stored and read again, are those of one forward pass, bit for bit."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from blockskip.errors import RunError
from blockskip.features import precompute as module
from blockskip.features.precompute import FeaturesArgument, Input, features_key, precompute
from blockskip.keys import key
from blockskip.loading.source import ModelSource
from blockskip.loading.transformer import StreamedTransformer
from blockskip.method.capture import capture
from blockskip.method.layout import State
from blockskip.method.skipping import ConstantResidual, Features, NoResidual, SkipRule
from blockskip.method.split import Split
from blockskip.precision import compute
from blockskip.store.groups import GroupStore
from blockskip.store.waiting import OnDisk
from blockskip.training.step import MicroBatch
from tests.families.groups import CPU, GUIDANCE, forward_inputs, group, transformer
from tests.method.bases import first

F32, BF16 = torch.float32, torch.bfloat16
GROUPS = 5
#: Sizes of the windows by how much memory there is.
WINDOWS = {"one group": [1, 1, 1, 1, 1], "two groups": [2, 2, 1], "all": [5]}
CASES = [
    ("flux", F32, "one group", (3, 2)), ("flux", F32, "two groups", (5, 0)), ("flux", F32, "all", (0, 6)),
    ("flux", BF16, "two groups", (2, 3)), ("sana", F32, "one group", (2, 2)), ("sana", F32, "all", (3, 0)),
    ("sana", BF16, "two groups", (1, 4)), ("sd3", F32, "two groups", (3, 2)), ("sd3", BF16, "one group", (2, 1)),
    ("qwen_image", F32, "two groups", (3, 2)), ("qwen_image", BF16, "one group", (2, 1)),
    ("pixart_sigma", F32, "all", (3, 0)), ("lumina2", F32, "two groups", (2, 2)),
    ("cogview4", BF16, "one group", (2, 1)),
    ("flux", F32, "two groups", (0, 0, (2, 5))), ("flux", BF16, "all", (0, 0, (4, 6))),
    ("sana", F32, "one group", (0, 0, (1, 4))), ("sd3", BF16, "two groups", (0, 0, (2, 3))),
]  # fmt: skip


def groups_of(source: ModelSource) -> list[MicroBatch]:
    """Five groups; the last is of another shape."""
    return [group(source, seed=seed) for seed in range(GROUPS - 1)] + [group(source, 1, seed=9, grid=(5, 7))]


def expected_features(
    source: ModelSource, batches: list[MicroBatch], split: Split, rule: SkipRule, dtype: torch.dtype = torch.float32
) -> list[Features]:
    full = transformer(source, dtype=dtype)
    with torch.no_grad(), compute(CPU, dtype):
        return [
            capture(full, source.family.layout, split, rule, forward_inputs(source, batch, dtype))[1]
            for batch in batches
        ]


def names_of(batches: list[MicroBatch]) -> list[str]:
    return [f"{index:032x}" for index in range(len(batches))]


def reader(batches: list[MicroBatch], asked: list[int] | None = None) -> Callable[[int], Input]:
    def read(index: int) -> Input:
        if asked is not None:
            asked.append(index)
        batch = batches[index]
        return Input(names_of(batches)[index], batch.latents, batch.noise, batch.sigma, batch.text, batch.places)

    return read


def store_features(
    source: ModelSource, batches: list[MicroBatch], split: Split, store: GroupStore, **options: Any
) -> None:
    given = {"window_bytes": 1 << 30, "dtype": torch.float32, "device": CPU, "guidance": GUIDANCE}
    rule = options.pop("rule", ConstantResidual())
    read = options.pop("read", reader(batches))
    precompute(source, split, rule, names_of(batches), read, store, **(given | options))


def assert_equal(found: Features, expected: Features) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(("name", "dtype", "window", "pair"), CASES, ids=str)
def test_stored_features_are_those_of_one_forward_pass(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype,
    window: str, pair: Any,
) -> None:  # fmt: skip
    source: ModelSource = request.getfixturevalue(name)
    batches, split, store = groups_of(source), Split(*pair), GroupStore(tmp_path)
    sizes: list[int] = []
    run_window = module.Window.__call__

    def counted(self: Any, groups: list[Input], *args: Any) -> None:
        sizes.append(len(groups))
        run_window(self, groups, *args)

    monkeypatch.setattr(module.Window, "__call__", counted)
    measured: list[int] = []
    group_bytes = module.Window.group_bytes

    def told(self: Any, first: Input) -> int:
        measured.append(group_bytes(self, first))
        return 100

    monkeypatch.setattr(module.Window, "group_bytes", told)
    expected = expected_features(source, batches, split, ConstantResidual(), dtype)
    room = {"one group": 1, "two groups": 250, "all": 1 << 30}[window]
    store_features(source, batches, split, store, window_bytes=room, dtype=dtype)
    assert sizes == WINDOWS[window]
    assert measured[0] >= _bytes_held(source, batches[0], split, expected[0], dtype)
    again = GroupStore(tmp_path)
    for key_, features in zip(names_of(batches), expected, strict=True):
        assert_equal(again.read(key_), features)
    for features, found in zip(expected, again.read_ahead(names_of(batches)), strict=True):
        assert_equal(found, features)


ON_DISK = [
    ("flux", F32, "two groups", (3, 2)), ("flux", BF16, "all", (0, 0, (4, 6))), ("sana", F32, "all", (0, 2)),
    ("lumina2", F32, "two groups", (2, 2)), ("qwen_image", BF16, "all", (3, 0)), ("hidream", F32, "all", (2, 2)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "dtype", "window", "pair"), ON_DISK, ids=str)
def test_states_that_wait_on_disk_give_the_same_features(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype,
    window: str, pair: Any,
) -> None:  # fmt: skip
    """And between two groups no tensor of any is in memory; the files of the largest window are told, and are gone."""
    source: ModelSource = request.getfixturevalue(name)
    batches, split, place = groups_of(source), Split(*pair), tmp_path / "waiting"
    stores = {kind: GroupStore(tmp_path / kind) for kind in ("memory", "disk")}
    group_bytes = module.Window.group_bytes
    monkeypatch.setattr(module.Window, "group_bytes", lambda self, first: sizes.append(group_bytes(self, first)) or 100)
    sizes: list[int] = []
    room = {"two groups": 250, "all": 1 << 30}[window]
    options: dict[str, Any] = {"window_bytes": room, "dtype": dtype}
    store_features(source, batches, split, stores["memory"], **options)
    held: list[int] = []
    put = OnDisk.put

    def watched(self: OnDisk, call: int, named: str, tree: Any) -> None:
        put(self, call, named, tree)
        assert not [value for leaves, _ in self._trees.values() for value in leaves if isinstance(value, torch.Tensor)]
        held.append(sum(path.stat().st_size for path in self._folder.iterdir()))

    monkeypatch.setattr(OnDisk, "put", watched)
    given = {"guidance": GUIDANCE, "device": CPU, "waiting_folder": place}
    peak = precompute(
        source, split, ConstantResidual(), names_of(batches), reader(batches), stores["disk"], **(options | given)
    )  # fmt: skip
    for key_ in names_of(batches):
        assert_equal(stores["disk"].read(key_), stores["memory"].read(key_))
    assert peak == max(held)
    together = {"two groups": 2, "all": GROUPS}[window]
    assert 0.5 * sizes[0] * together < peak < sizes[0] * together + 4096 * together * 8  # files have headers
    assert list(place.iterdir()) == []


def test_a_disk_that_is_full_is_told(flux: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("blockskip.store.waiting.torch.save", full)
    with pytest.raises(RunError, match=r"its disk is full.*features\.window_on") as caught:
        store_features(
            flux, groups_of(flux), Split(2, 2), GroupStore(tmp_path / "store"), waiting_folder=tmp_path / "waiting"
        )
    assert str(tmp_path / "waiting") in str(caught.value)
    assert list((tmp_path / "waiting").iterdir()) == []


def _bytes_held(source: ModelSource, batch: MicroBatch, split: Split, features: Features, dtype: torch.dtype) -> int:
    """Bytes that a group holds in a window at most: its state, its front features, what entered a span."""
    full = transformer(source, dtype=dtype)
    streams: dict[int, State] = {}
    entered: dict[int, torch.Tensor] = {}
    streamed = StreamedTransformer(source, dtype, CPU)
    with torch.no_grad(), compute(CPU, dtype):

        def visit(block: int, _: int, state: State, image: torch.Tensor) -> None:
            streams[block], entered[block] = state, image

        list(streamed.run([lambda: forward_inputs(source, batch, dtype)], visit))
    count = source.family.layout.count(full)
    held = []
    last, (start, stop) = count if split.passes is None else split.passes, split.inner
    for block in range(last):
        size = sum(value.nbytes for value in streams[block].values())
        if split.front and block >= split.front - 1:
            size += sum(value.nbytes for name, value in features.items() if name.startswith("front."))
        if split.tail and block >= count - split.tail:
            size += entered[count - split.tail].nbytes
        if stop and block >= start - 1:
            size += sum(value.nbytes for value in streams[start - 1].values())
        held.append(size)
    return max(held)


def test_a_streamed_pass_gives_the_whole_model_s_output_and_states(source: ModelSource) -> None:
    batches, full = groups_of(source)[-2:], transformer(source)
    layout = source.family.layout
    streamed = StreamedTransformer(source, torch.float32, CPU)
    assert streamed.num_blocks == layout.count(full)
    visited: list[tuple[int, int]] = []
    blocks_seen: list[State] = []

    def visit(block: int, call: int, state: State, entered: torch.Tensor) -> None:
        visited.append((block, call))
        if call == 1:
            blocks_seen.append(state)

    calls = [lambda batch=batch: forward_inputs(source, batch) for batch in batches]  # type: ignore[misc]
    with torch.no_grad():
        outputs = {call: first(output) for call, output, _ in streamed.run(calls, visit)}
        for call, batch in enumerate(batches):
            assert torch.equal(outputs[call], first(full(**forward_inputs(source, batch))))
        for front in range(1, layout.count(full)):
            _, features = capture(full, layout, Split(front, 0), ConstantResidual(), calls[1]())
            assert_equal({f"front.{name}": value for name, value in blocks_seen[front - 1].items()}, features)
        assert visited == [(block, call) for block in range(layout.count(full)) for call in range(2)]
        visited.clear()
        assert list(streamed.run(calls, visit, stop=2)) == []
    assert visited == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_only_what_the_store_lacks_is_computed_once(flux: ModelSource, tmp_path: Path) -> None:
    batches, split, asked = groups_of(flux), Split(2, 1), []
    store = GroupStore(tmp_path)
    read = reader(batches, asked)
    store_features(flux, batches, split, store, read=read)
    assert asked == [0, 0, 1, 2, 3, 4]  # the first group also tells how large a group is
    kept = store.read(names_of(batches)[3])
    store.discard(names_of(batches)[3])
    asked.clear()
    store_features(flux, batches, split, store, read=read)
    assert asked == [3, 3]
    assert_equal(store.read(names_of(batches)[3]), kept)
    asked.clear()
    store_features(flux, batches, split, store, read=read)
    assert asked == []


def test_equal_keys_are_computed_once(flux: ModelSource, tmp_path: Path) -> None:
    asked: list[int] = []
    batch, store = group(flux), GroupStore(tmp_path)

    def read(index: int) -> Input:
        asked.append(index)
        return Input("ab", batch.latents, batch.noise, batch.sigma, batch.text)

    precompute(
        flux, Split(1, 1), ConstantResidual(), ["ab", "ab", "ab"], read, store, window_bytes=1, dtype=torch.float32,
        device=CPU, guidance=1.0,
    )  # fmt: skip
    assert len(asked) == 2  # once to tell how large a group is


def test_nothing_is_loaded_when_nothing_is_stored(
    flux: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "StreamedTransformer", lambda *_: pytest.fail("a transformer was loaded"))
    batches, store = groups_of(flux), GroupStore(tmp_path)
    store_features(flux, batches, Split(0, 0), store)
    store_features(flux, batches, Split(3, 0), store, rule=NoResidual())
    assert store.size() == 0


def test_a_front_alone_runs_no_block_behind_it(
    flux: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[int] = []
    block = StreamedTransformer.block

    def counted(self: StreamedTransformer, index: int, *args: Any) -> Any:
        loaded.append(index)
        return block(self, index, *args)

    monkeypatch.setattr(StreamedTransformer, "block", counted)
    store_features(flux, [group(flux)], Split(3, 0), GroupStore(tmp_path))
    assert loaded == [0, 0, 1, 2]  # block 0 also tells how large a group is


def test_every_part_of_the_argument_is_part_of_the_key() -> None:
    first = FeaturesArgument(
        "w", ("a",), 3, 2, (0, 0), "residual", ("t",), "p", (0.25, 0.5), (1, 2), 1.0, "flux", "torch.float32"
    )
    changes: dict[str, Any] = {
        "transformer": "v", "adapters": (), "front": 4, "tail": 1, "inner": (1, 2), "rule": "none", "text": ("u",),
        "pixels": "q", "sigmas": (0.25, 0.5000001), "noise_seeds": (1, 3), "guidance": 1.5, "family": "sana",
        "dtype": "torch.bfloat16", "stored": "int8", "places": ((0.0, 0.5, 4.0, 4.0),),
    }  # fmt: skip
    assert set(changes) == set(first.__dataclass_fields__)
    keys = {features_key(FeaturesArgument(**{**first.__dict__, name: value})) for name, value in changes.items()}
    assert len(keys | {features_key(first)}) == len(changes) + 1
    assert features_key(FeaturesArgument(**first.__dict__)) == features_key(first)
    assert features_key(first) == key("features", first)
