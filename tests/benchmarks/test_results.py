"""docs/results.md says what the files of lines say, and an order is told from the interval alone."""

from pathlib import Path

import pytest

from benchmarks import results
from blockskip.benchmark.rows import Lines, Measured
from blockskip.benchmark.settings import SETTINGS
from tests.benchmark.lines import ENCODER, line, two_subjects, write


def test_published_rows_and_orders_are_of_settings_that_there_are() -> None:
    for published in results.PUBLISHED.values():
        assert set(published) <= set(SETTINGS)
    assert {name for pair in results.ORDERS for name in pair} <= set(SETTINGS)
    assert results.FLUX["lora"] == (0.7324, 0.8146, 0.3173) and results.SANA["lora-fa"][0] == 0.6268


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(0.1, 0.3, "agrees"), (-0.3, -0.1, "does not agree"), (-0.1, 0.3, "cannot be told"), (None, None, "one subject")],
)
def test_an_order_is_told_from_the_interval(low: float | None, high: float | None, verdict: str) -> None:
    assert results.Order("a", "b", 0.1, Measured(0.2, 0.1, low, high, 2)).verdict.startswith(verdict)
    assert "close" in results.Order("a", "b", 0.001, Measured(0.2, 0.1, -1, 1, 2)).verdict


def test_the_document_has_published_and_own_figures(tmp_path: Path) -> None:
    rows = [*two_subjects(), *(line("patches", name, 1.0, [0.8, 0.8]) for name in ("cat", "dog"))]
    write(tmp_path / "builtin.jsonl", rows)
    text = results.filled(
        "# R\n<!-- builtin -->\n<!-- /builtin -->\nend\n".replace("\n<!-- /", "\nold\n<!-- /"), tmp_path
    )
    assert "old" not in text and text.endswith("<!-- /builtin -->\nend\n") and results.filled(text, tmp_path) == text
    assert "| patches, low to high | 0.7253 | 0.8099 | 0.3196 | 1.10 | 1.00 |" in text
    assert "| LISA | 0.7387 | 0.8194 | 0.3177 | – | – |" in text
    found = results.orders(Lines.read(tmp_path / "builtin.jsonl"), results.FLUX, f"share:{ENCODER}:drawable")
    assert [(order.first, order.second, order.verdict) for order in found] == [("patches", "resize", "agrees")]
    assert found[0].published == pytest.approx(0.0089) and found[0].found.difference == pytest.approx(1.1 - 0.375)
    assert "| patches, low to high > resize only | +0.0089 | +0.73 (" in text


def test_a_file_without_a_place_in_the_document_gets_one(tmp_path: Path) -> None:
    write(tmp_path / "builtin-sana-quick.jsonl", two_subjects())
    text = results.filled(results.HEAD, tmp_path)
    assert text.startswith(results.HEAD) and "## builtin-sana-quick\n" in text
    assert "| LoRA | 0.7374 |" in text and results.filled(text, tmp_path) == text


def test_the_document_in_docs_has_the_figures_of_the_files() -> None:
    if results.DOCUMENT.is_file():
        text = results.DOCUMENT.read_text(encoding="utf-8")
        assert results.filled(text) == text
    else:
        assert not list(results.FOLDER.glob("*.jsonl")), "there are results, and no document"


def test_the_document_is_what_the_files_give() -> None:
    assert list(results.FOLDER.glob("*.jsonl")) and results.main([]) == 0
