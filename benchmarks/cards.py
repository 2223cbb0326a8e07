"""What fits on which graphics card: ``cards.json``, and the README's table that is made from it.

    python -m benchmarks.cards               compares the cheapest model with the file
    python -m benchmarks.cards --update      plans every model on every card anew: half an hour
    python -m benchmarks.cards --update fal/AuraFlow-v0.3      plans this one anew, and keeps the others' rows
    python -m benchmarks.cards --readme      writes the README's table from the file

No weights and no GPU are needed; ``blockskip plan --table`` prints the same table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from blockskip.planner.cards import CARDS, Row, as_json, fitted_cards, from_json
from blockskip.planner.cards_text import render_markdown
from blockskip.planner.named import named_models
from blockskip.progress import progress

FILE = Path(__file__).with_suffix(".json")
README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- cards -->\n", "\n<!-- /cards -->"
#: The model that is planned anew to see that the file is still what the code gives.
CHEAPEST = "Efficient-Large-Model/Sana_600M_1024px_diffusers"


def planned(models: Sequence[str], cards: Sequence[float] = tuple(CARDS)) -> list[Row]:
    """What the planner says now, at the package's defaults."""
    with progress(len(models) * len(cards), "Plans") as bar:
        return fitted_cards({}, models, cards, lambda model: bar.advance(1, model))


def read(file: Path = FILE) -> list[Row]:
    """The rows on record."""
    return from_json(json.loads(file.read_text(encoding="utf-8")))


def updated(models: Sequence[str]) -> list[Row]:
    """The rows of all named models, those of ``models`` planned now (none: all), the others as they are on record."""
    known = named_models()
    anew = planned([name for name in known if name in models] or known)
    kept = [row for row in read() if row.model not in models] if models else []
    return sorted([*anew, *kept], key=lambda row: (known.index(row.model), list(CARDS).index(row.card)))


def in_readme(text: str) -> str:
    """The table between its marks in the README.

    Raises:
        ValueError: the marks are not there.
    """
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare or write; the exit status is 1 where the file is not what the planner says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cards", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--update", nargs="*", metavar="MODEL",
        help=f"write {FILE.name} and the README's table anew; with names, only their rows",
    )  # fmt: skip
    parser.add_argument("--readme", action="store_true", help=f"write the README's table from {FILE.name}")
    options = parser.parse_args(arguments)
    if options.update is not None:
        document = as_json(updated(options.update))
        FILE.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if options.update is not None or options.readme:
        before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
        text = before + BEGIN + render_markdown(read()) + END + rest.partition(END)[2]
        README.write_text(text, encoding="utf-8", newline="\n")
        return 0
    same = planned([CHEAPEST]) == [row for row in read() if row.model == CHEAPEST]
    print("The file is what the planner says." if same else f"{FILE.name} is not what the planner says: --update.")
    return not same


if __name__ == "__main__":
    raise SystemExit(main())
