"""docs/selection.md says what the files of results say, and what they hold is of the shipped models."""

import pytest

from benchmarks import selections
from blockskip.loading.source import open_model
from blockskip.loading.weights import Weights


def test_the_document_has_the_figures_of_the_files() -> None:
    text = selections.DOCUMENT.read_text(encoding="utf-8")
    assert selections.filled(text) == text
    changed = text.replace("| 30% | 4 |", "| 30% | 5 |")
    assert changed != text and selections.filled(changed) == text


@pytest.mark.parametrize("model", selections.MODELS)
def test_results_are_of_the_weights_that_ship(model: str) -> None:
    identity = selections.read(model)["model"]["identity"]
    assert identity[0] == Weights(open_model(model).part_folder("transformer")).identity()
