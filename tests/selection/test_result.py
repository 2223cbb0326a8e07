"""What a result says of its distances, recomputed from made-up ones: intervals, splits, and how far probes agree."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from blockskip.method.selection import Masked, masked_sets, single_blocks
from blockskip.method.split import Split
from blockskip.selection.model import open_for
from blockskip.selection.request import Request
from blockskip.selection.result import Sweep, agreement, document
from blockskip.selection.table import Table
from tests.selection.small import request

COUNT = 4
#: Of a model with seven blocks, not in the order in which a probe asks for them.
SETS = [item for item in masked_sets(7, COUNT, 2) if item.kind != "none"][::-1] + single_blocks(7)


def place(kind: str, number: int) -> int:
    return next(index for index, item in enumerate(SETS) if (item.kind, item.number) == (kind, number))


def made_up(seed: int) -> Sweep:
    """Distances of three adapters and four pictures each."""
    return Sweep.of(SETS, np.random.default_rng(seed).uniform(0.1, 1, size=(3, 4, len(SETS))))


def cost(row: np.ndarray, front: int, back: int) -> float:  # type: ignore[type-arg]
    """front(n) + back(m) of one row of distances by set."""
    return float((row[place("front", front)] if front else 0) + (row[place("back", back)] if back else 0))


def best(row: np.ndarray, count: int) -> Split:  # type: ignore[type-arg]
    front = min(range(count + 1), key=lambda front: cost(row, front, count - front))
    return Split(front, count - front)


def spearman(first: list[float], second: list[float]) -> float:
    """Without equal values."""
    one, other = (np.asarray([sum(a < b for a in row) for b in row], dtype=float) for row in (first, second))
    count = len(first)
    return 1 - 6 * float(((one - other) ** 2).sum()) / (count * (count**2 - 1))


def test_the_interval_holds_95_of_100_means() -> None:
    means = np.random.default_rng(0).permutation(1001.0 * np.arange(1, 1002))[:, None] + np.arange(len(SETS))
    sweep = Sweep(tuple(SETS), np.ones((1, 1, len(SETS))), means)
    for entry in sweep.entries("back"):
        offset = place("back", entry["number"])
        assert entry["low"] == pytest.approx(1001 * 26 + offset) and entry["high"] == pytest.approx(1001 * 976 + offset)
        assert entry["blocks"] == list(range(7 - entry["number"], 7))


def test_a_split_s_share_is_that_of_the_resampled_means_that_choose_it() -> None:
    sweep = made_up(1)
    for count in range(1, COUNT + 1):
        chosen = Counter(best(row, count) for row in sweep.means)
        shares = sweep.chosen_in(count)
        assert shares == {split: times / len(sweep.means) for split, times in chosen.items()}
        assert list(shares.values()) == sorted(shares.values(), reverse=True)
        assert sweep.split(count) == best(sweep.values.mean((0, 1)), count)
    assert len(shares) > 1


def test_probes_are_compared_by_the_sets_and_by_the_splits_of_each_size() -> None:
    one, other = made_up(2), made_up(3)
    found = agreement(one, other, [1, 3, COUNT], ("front", "back", "window", "block"))
    rows = [sweep.values.mean((0, 1)) for sweep in (one, other)]
    expected = {}
    for kind, name in (("front", "front"), ("back", "back"), ("window", "window"), ("block", "single blocks")):
        places = [place(kind, item.number) for item in SETS if item.kind == kind]
        expected[name] = spearman(*(row[places].tolist() for row in rows))
    for count in (3, COUNT):
        costs = [[cost(row, front, count - front) for front in range(count + 1)] for row in rows]
        expected[f"splits of {count}"] = spearman(*costs)
    assert found == pytest.approx(expected)
    assert list(agreement(one, one, [COUNT]).values()) == pytest.approx([1.0] * 5)


def test_splits_are_those_of_k_fewer_from_the_other_end() -> None:
    """Sums of front(n) and back(k - n), not of front(n) and back(n): here the one grows while the other shrinks."""
    sets = masked_sets(6, 3, 0)
    rising, falling = [0.0, 1, 2, 3, 2, 4, 6], [0.0, 2, 4, 6, 1, 2, 3]  # none, front 1..3, back 1..3
    one, other = (Sweep.of(sets, np.asarray([[row]])) for row in (rising, falling))
    assert agreement(one, other, [3])["splits of 3"] == pytest.approx(-1)


def test_beside_a_choice_stand_the_paper_s_shares_and_the_other_probe_s_choice(flux_folder: Path) -> None:
    model = open_for(request(flux_folder, Path("nowhere"), ()))
    sets = [*masked_sets(8, COUNT, 2), *single_blocks(8)]
    sweeps = {}
    for number, probe in enumerate(("pictures", "velocity")):
        values = np.random.default_rng(number).uniform(0.1, 1, size=(2, 3, len(sets)))
        sweeps[probe] = Sweep.of(sets, values)
    found = document(model, [], "pixels", {0.25: 2, 0.5: 4}, sweeps, None)
    assert [entry["paper_shares"] for entry in found["splits"]] == [[1, 1], [3, 1]]
    for entry in found["splits"]:
        pair = sweeps["pictures"].split(entry["skipped"])
        assert (entry["front"], entry["tail"]) == (pair.front, pair.tail)
        other = sweeps["velocity"].split(entry["skipped"])
        assert entry["other_probes"] == {"velocity": [other.front, other.tail]}
        named = {f"{split.front}, {split.tail}": share for split, share in
                 sweeps["pictures"].chosen_in(entry["skipped"]).items()}  # fmt: skip
        assert entry["chosen_in"] == named and len(named) > 1


@pytest.mark.parametrize(("blocks", "width"), [(57, 14), (20, 5), (8, 2), (2, 1), (1, 1)])
def test_the_window_is_a_quarter_of_the_blocks(blocks: int, width: int) -> None:
    assert Request().width_of_window(blocks) == width
    assert Request(window=0).width_of_window(blocks) == 0 and Request(window=1).width_of_window(blocks) == 1


def test_after_a_line_that_was_cut_off_every_line_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "distances.jsonl"
    first = Table(path)
    first.add("a", [1.0, 2.0])
    first.add("b", {"distances": [3.0]})
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"key": "c", "value": [4.')
    again = Table(path)
    again.add("d", [5.0])
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [line["key"] for line in lines] == ["a", "b", "d"]
    assert path.read_bytes().startswith(whole)
    last = Table(path)
    found = [last.get(name) for name in ("a", "b", "c", "d")]
    assert found == [[1.0, 2.0], {"distances": [3.0]}, None, [5.0]]
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_set_is_found_by_its_number_wherever_it_stands() -> None:
    sweep = made_up(5)
    for kind in ("front", "back", "window", "block"):
        items: list[Masked] = [SETS[index] for index in sweep.places(kind)]  # type: ignore[arg-type]
        assert [item.number for item in items] == sorted(item.number for item in SETS if item.kind == kind)
