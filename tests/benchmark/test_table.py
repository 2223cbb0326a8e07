"""The arithmetic of the table against numbers worked out by hand."""

from pathlib import Path

import numpy as np
import pytest

from blockskip.benchmark import figures
from blockskip.benchmark.rows import Lines, paired
from blockskip.benchmark.table import Table
from blockskip.errors import UserError
from tests.benchmark.lines import ENCODER, SIZE, base, line, two_subjects, write


@pytest.fixture
def lines(tmp_path: Path) -> Lines:
    return Lines.read(write(tmp_path / "results.jsonl", two_subjects()))


def test_the_held_out_loss_is_a_share_of_plain_loras_improvement(lines: Lines) -> None:
    found = lines.measured(f"heldout:{SIZE}", "resize")
    assert found is not None and found.subjects == 2
    assert found.mean == pytest.approx((0.5 / 1.0 + 1.5 / 2.0) / 2)  # of 2 -> 1 and of 3 -> 1
    assert found.difference == pytest.approx(0.625 - 1)
    assert (found.low, found.high) == (pytest.approx(-0.5), pytest.approx(-0.25))
    plain = lines.measured(f"heldout:{SIZE}", "lora")
    assert plain is not None and plain.mean == pytest.approx(1) and plain.difference is None


def test_where_plain_lora_does_not_improve_there_is_no_share(tmp_path: Path) -> None:
    """Of an improvement below zero the worst setting would be the best."""
    some = [base("cat", 1.0, [0.4], 0.8), line("lora", "cat", 1.2, [0.6]), line("resize", "cat", 1.4, [0.5])]
    some += [base("dog", 2.0, [0.4], 0.8), line("lora", "dog", 1.0, [0.6]), line("resize", "dog", 1.5, [0.5])]
    found = Lines.read(write(tmp_path / "r.jsonl", some))
    assert found.heldout_share(found.runs["resize"]["cat", 0], SIZE) is None
    measured = found.measured(f"heldout:{SIZE}", "resize")
    assert measured is not None and measured.mean == pytest.approx(0.5) and measured.subjects == 1


def test_subject_fidelity_is_a_share_of_the_way_from_floor_to_ceiling(lines: Lines) -> None:
    found = lines.measured(f"share:{ENCODER}:drawable", "resize")
    cat, dog = [0.25, 0.25], [0.0, 1.0]  # (0.5 - 0.4) / 0.4 twice; (0.2 - 0.2) / 0.5 and (0.7 - 0.2) / 0.5
    assert found is not None and found.mean == pytest.approx((np.mean(cat) + np.mean(dog)) / 2)
    plain = [[0.5, 1.0], [1.0, 1.0]]
    assert found.difference == pytest.approx(np.mean([np.mean(cat) - 0.75, np.mean(dog) - 1.0]))
    differences = [[a - b for a, b in zip(*pair, strict=True)] for pair in zip([cat, dog], plain, strict=True)]
    assert (found.difference, found.low, found.high) == pytest.approx(paired(differences))
    assert found.low is not None and found.high is not None and found.low < found.difference < found.high


def test_pictures_are_compared_with_those_of_the_same_prompt_and_seed(tmp_path: Path) -> None:
    """Far apart from each other and always a tenth better than plain LoRA's: the interval has no width."""
    some = []
    for subject in ("cat", "dog"):
        some += [base(subject, 2.0, [0.0, 0.0], 1.0), line("lora", subject, 1.0, [0.0, 0.8]),
                 line("resize", subject, 1.0, [0.1, 0.9])]  # fmt: skip
    found = Lines.read(write(tmp_path / "r.jsonl", some)).measured(f"share:{ENCODER}:drawable", "resize")
    assert found is not None and (found.difference, found.low, found.high) == pytest.approx((0.1, 0.1, 0.1))


def test_the_interval_is_of_subjects_drawn_anew_and_pictures_inside_them() -> None:
    """Two subjects without spread inside: the mean of two draws is -1 or 1 in a quarter of all cases each."""
    mean, low, high = paired([[-1.0, -1.0], [1.0, 1.0]])
    assert (mean, low, high) == (0.0, -1.0, 1.0)
    mean, low, high = paired([[0.3, 0.3], [0.3, 0.3]])
    assert (mean, low, high) == (pytest.approx(0.3), pytest.approx(0.3), pytest.approx(0.3))
    assert paired([[0.0, 2.0]]) == (1.0, None, None)
    rng = np.random.default_rng(0)
    values = rng.normal(0.5, 1.0, (30, 40))
    mean, low, high = paired(values.tolist())
    half = 1.96 * np.sqrt(values.mean(1).var() / 30 + values.var(1).mean() / (30 * 40))  # both draws vary
    assert low == pytest.approx(mean - half, abs=0.1 * half) and high == pytest.approx(mean + half, abs=0.1 * half)


def test_other_rows_change_nothing(tmp_path: Path) -> None:
    everything = two_subjects()
    fewer = [item for item in everything if item["setting"] != "resize"]
    more = [*everything, line("patches", "cat", 1.2, [0.6, 0.6]), line("patches", "dog", 1.2, [0.6, 0.6])]
    tables = [Table.of(Lines.read(write(tmp_path / f"{len(some)}.jsonl", some))) for some in (fewer, everything, more)]
    rows = [{row[0]: row[1:] for row in table.rows()} for table in tables]
    assert rows[0]["LORA"] == rows[1]["LORA"] == rows[2]["LORA"] and rows[1]["RESIZE"] == rows[2]["RESIZE"]
    differences = [{row[0]: row[1:] for row in table.differences()} for table in tables]
    assert differences[1]["RESIZE"] == differences[2]["RESIZE"] and "PATCHES" in differences[2]


def test_a_row_that_is_missing_on_a_subject_is_compared_on_the_others(tmp_path: Path) -> None:
    some = [item for item in two_subjects() if (item["setting"], item["subject"]) != ("lora", "dog")]
    found = Lines.read(write(tmp_path / "r.jsonl", some)).measured(f"share:{ENCODER}:drawable", "resize")
    assert found is not None and found.difference == pytest.approx(0.25 - 0.75) and found.low is None
    text = Table.of(Lines.read(tmp_path / "r.jsonl")).text()
    assert "so far LORA 1" in text


def test_seeds_of_a_subject_count_as_its_pictures(tmp_path: Path) -> None:
    some = [
        base("cat", 2.0, [0.0, 0.0], 1.0),
        *(line("lora", "cat", 1.0, [0.5, 0.5], seed) for seed in (0, 1)),
        line("resize", "cat", 1.0, [0.5, 0.5], 0), line("resize", "cat", 1.0, [0.1, 0.1], 1),
    ]  # fmt: skip
    found = Lines.read(write(tmp_path / "r.jsonl", some)).measured(f"share:{ENCODER}:drawable", "resize")
    assert found is not None and (found.mean, found.difference, found.subjects) == (
        pytest.approx(0.3), pytest.approx(-0.2), 1,
    )  # fmt: skip


def test_floor_and_ceiling_too_near_for_a_share_give_none(tmp_path: Path) -> None:
    some = [base("cat", 2.0, [0.5, 0.5], 0.505), line("lora", "cat", 1.0, [0.6, 0.6])]
    table = Table.of(Lines.read(write(tmp_path / "r.jsonl", some)))
    assert "subject fidelity" not in table.columns() and "held-out loss, 64 x 64" in table.columns()


def test_every_row_has_memory_and_time_and_the_ends_of_each_scale(lines: Lines) -> None:
    table = Table.of(lines)
    rows = {row[0]: dict(zip(table.columns(), row, strict=True)) for row in table.rows()}
    assert rows["LORA"]["memory, training"] == "3.00 MiB" and rows["LORA"]["memory, all"] == "5.00 MiB"
    assert rows["LORA"]["planned"] == "2.00 MiB" and rows["base model"]["planned"] == ""
    assert rows["RESIZE"]["time"] == "30 s" and rows["RESIZE"]["left out"] == "0, 6-7 of 8"
    assert rows["base model"]["subject fidelity"] == "0.00" and rows["real pictures"]["subject fidelity"] == "1.00"
    assert rows["base model"]["cosine with real pictures"] == "0.150"  # (0.4 + 0.2) / 2 / 2
    assert rows["real pictures"]["cosine with real pictures"] == "0.375"  # (0.8 + 0.7) / 2 / 2
    assert rows["real pictures"]["prompt"] == "0.900" and rows["LORA"]["background"] == "0.50"
    assert rows["LORA"]["drift"] == "0.200" and rows["base model"]["drift"] == "0.000"
    assert "| RESIZE | -0.38 (-0.50 to -0.25) |" in table.markdown()


def test_the_plots_show_every_row(lines: Lines, tmp_path: Path) -> None:
    table = Table.of(lines)
    assert figures.curve(table, f"heldout:{SIZE}", "resize") == [(0, 0.0), (5, 0.625), (10, 0.625)]
    assert figures.curve(table, f"share:{ENCODER}:drawable", "lora") == [(0, 0.0), (5, 0.875), (10, 0.875)]
    for draw in (figures.memory, figures.steps):
        draw(tmp_path / "plot.png", table)
        first = (tmp_path / "plot.png").read_bytes()
        draw(tmp_path / "plot.png", table)
        assert first == (tmp_path / "plot.png").read_bytes() and len(first) > 5000


@pytest.mark.parametrize("text", ["no json\n", '{"a": 1}\n', "[1]\n"])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match="no file of results"):
        Lines.read(path)
    with pytest.raises(UserError, match="cannot be read"):
        Lines.read(tmp_path / "nothing.jsonl")
