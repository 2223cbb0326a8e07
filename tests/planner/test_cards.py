"""The table of cards: what is fitted to what, the three forms, what is refused, and that the README's is today's."""

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks import cards as record
from blockskip.cli import main
from blockskip.errors import UserError
from blockskip.planner.cards import CARDS, RESERVED, SHOWN, Row, as_json, card_memory, fitted_cards, from_json
from blockskip.planner.cards_text import render_markdown, render_text, short_name
from blockskip.planner.named import named_models

GIB = 2**30
SETTINGS = {
    "data.resolution": 512, "data.text_length": 128, "model.dtype": "bfloat16", "model.quantization": "nf4",
    "model.stream_text_encoders": True, "model.read_ahead": True,
    "train.gradient_checkpointing": True, "train.stream_middle": False,
}  # fmt: skip


def row(card: float, model: str = "owner/a-model_1024px_diffusers", **others: object) -> Row:
    return dataclasses.replace(
        Row(model, card, True, (7, 10), 57, SETTINGS, 3 * GIB, 2 * GIB, 5 * GIB, "train"), **others
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "found"), [("8GB", 8), ("8 GiB", 8), ("10.5gb", 10.5)])
def test_the_memory_of_a_card_is_told_in_gib_whatever_it_is_called(text: str, found: float) -> None:
    assert card_memory(text) == found


@pytest.mark.parametrize("text", ["", "lots", "1GB", "-8", "8", "8MiB", "nan"])
def test_what_is_no_card_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"memory\.device"):
        card_memory(text)


def test_a_row_is_within_what_the_card_leaves_and_a_setting_of_the_user_stays(guided_folder: Path) -> None:
    given = {"data.resolution": 64, "data.full_resolution": 128, "lora.rank": 2, "train.steps": 2}
    small = (RESERVED + 2**14) / GIB  # 16 KiB for tensors: the tiny model takes more
    rows = fitted_cards(given, [str(guided_folder)], [small, 2])
    assert [(one.card, one.fits) for one in rows] == [(small, False), (2, True)]
    assert rows[0].device_peak_bytes > 2**14
    assert rows[1].device_peak_bytes <= GIB
    for one in rows:
        assert one.settings.keys() == set(SHOWN)
        assert one.settings["data.resolution"] == 64
    assert rows[1].settings["model.quantization"] == "none"
    assert from_json(json.loads(json.dumps(as_json(rows)))) == rows
    bounded = fitted_cards(given | {"memory.disk": "20KiB"}, [str(guided_folder)], [2])
    assert bounded[0].disk_bytes != rows[1].disk_bytes


def test_cards_with_equal_settings_share_a_row_and_what_does_not_fit_is_told() -> None:
    unfit = row(4, fits=False)
    table = render_markdown([unfit, row(6), row(8), row(12, device_peak_bytes=9 * GIB)]).splitlines()
    assert table[2].startswith("| a-model | 4 GB | - | - | - | - | - | (3.00 GiB) | (2.00 GiB) | - |")
    assert table[3] == "|  | 6-8 GB | 512 | 17/57 | nf4 | yes | 128 streamed | 3.00 GiB | 2.00 GiB | 5.00 GiB |"
    assert "9.00 GiB" in table[4]
    assert CARDS[8] in table[6]
    assert CARDS[24] not in table[6]
    assert "1.00 GiB" in table[7]
    streamed = SETTINGS | {"model.quantization": "none", "train.stream_middle": True}
    plain = SETTINGS | {"model.quantization": "none", "model.stream_text_encoders": False}
    text = render_text([row(4, settings=streamed), row(6, settings=plain), row(6, model="m")])
    lines = text.splitlines()
    assert lines[2] == "owner/a-model_1024px_diffusers"
    assert "streamed" in lines[3]
    assert "bfloat16" in lines[4] and lines[4].count("streamed") == 0
    assert lines[5] == "m"
    assert max(map(len, lines)) <= 100


def test_cards_that_nobody_sells_have_no_line_of_names() -> None:
    for text in (render_text([row(2, fits=False)]), render_markdown([row(2, fits=False)])):
        assert [line for line in text.splitlines() if line.strip(" .") == ""] == [""], "but for the one below the table"
        assert "2 GB" in text and "2 GB:" not in text


def test_all_that_is_wrong_with_a_table_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    bad = ["--memory", "8", "lots", "--disk", "9", "--model", "nowhere", "builtin", "neither"]
    assert main(["plan", "--table", *bad]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 5
    for fragment in ('"8"', '"lots"', 'memory.disk = "9"', '"nowhere"', '"neither"'):
        assert sum(fragment in sentence for sentence in told) == 1, fragment


def test_names_are_short() -> None:
    assert short_name("Efficient-Large-Model/Sana_600M_1024px_diffusers") == "Sana_600M"
    assert short_name("stabilityai/stable-diffusion-3-medium-diffusers") == "stable-diffusion-3-medium"
    assert short_name("/a/local/folder") == "/a/local/folder"


def test_the_command_has_three_forms(guided_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["plan", "--table", "--model", str(guided_folder), "--memory", "8GB", "--memory", "12GB", "--steps", "2",
               "--resolution", "32", "--data.full-resolution", "64"]  # fmt: skip
    assert main([*options, "--json"]) == 0
    rows = from_json(json.loads(capsys.readouterr().out))
    assert [one.card for one in rows] == [8, 12]
    assert main(options) == 0
    assert capsys.readouterr().out == render_text(rows) + "\n"
    assert main([*options, "--markdown"]) == 0
    assert capsys.readouterr().out == render_markdown(rows) + "\n"


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["--table", "--compare"], ["--compare", "--table"]),
        (["--table", "--markdown", "--json"], ["--markdown", "--json"]),
        (["--table", "--device", "cpu"], ["train.device", "CUDA"]),
        (["--table", "--memory", "lots"], ['memory.device = "lots"', "8GB"]),
        (["--table", "--memory", "8"], ['memory.device = "8" has no unit', "8GB"]),
        (["--table", "--memory", "12GB", "8", "GB"], ["--memory 8 GB are two words", "--memory 8GB or", '"8 GB"']),
        (["--table", "--memory", "-8GB"], ['memory.device = "-8GB" is not the memory of a card']),
        (["--table", "--disk", "9"], ['memory.disk = "9" has no unit']),
        (["--table", "--model", "nowhere"], ["nowhere"]),
        (["--markdown"], ["--markdown", "--table"]),
        (["--model", "one", "two"], ["model.path", "one, two", "--table"]),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: list[str], fragments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    sentence = err.splitlines()[-1]
    for fragment in fragments:
        assert fragment in sentence


def test_the_readme_has_the_table_on_record() -> None:
    rows = record.read()
    assert [(one.model, one.card) for one in rows] == [(model, card) for model in named_models() for card in CARDS]
    assert record.in_readme(record.README.read_text(encoding="utf-8")) == render_markdown(rows)


def test_the_cheapest_model_is_on_record_as_it_is_planned_now() -> None:
    ends = (min(CARDS), max(CARDS))
    recorded = [one for one in record.read() if one.model == record.CHEAPEST and one.card in ends]
    assert record.planned([record.CHEAPEST], ends) == recorded


def test_some_models_are_planned_anew_and_the_others_rows_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        record, "planned", lambda models: [row(card, name, disk_bytes=1) for name in models for card in CARDS]
    )
    name = named_models()[3]
    rows = record.updated([name])
    assert [(one.model, one.card) for one in rows] == [(model, card) for model in named_models() for card in CARDS]
    assert [one.model for one in rows if one.disk_bytes == 1] == [name] * len(CARDS)
    assert all(one.disk_bytes == 1 for one in record.updated([]))
