"""What the paper's tables say and what ours do: docs/results.md from ``results/*.jsonl``.

    blockskip benchmark --model builtin --set test --settings all --count 12 --output build/builtin
    cp build/builtin/results.jsonl benchmarks/results/builtin.jsonl
    python -m benchmarks.results --update

Each file of lines gives three tables: the measures, the published figures beside ours, and whether each published order
of two settings holds here. Without ``--update`` the document is compared with the files.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from blockskip.benchmark.rows import Lines, Measured
from blockskip.benchmark.settings import REFERENCE, SETTINGS
from blockskip.benchmark.table import Table, in_markdown

FOLDER = Path(__file__).with_suffix("")
DOCUMENT = Path(__file__).parent.parent / "docs" / "results.md"
#: DINO, CLIP-I and CLIP-T of the paper (arXiv 2603.20755, Tables 1, 2 and 11) by setting; None: not given.
FLUX: dict[str, tuple[float | None, ...]] = {
    "lora": (0.7324, 0.8146, 0.3173),
    "lisa": (0.7387, 0.8194, 0.3177),
    "hollow-30": (0.4899, 0.7031, 0.3094),
    "blockskip-30": (0.7194, 0.8036, 0.3199),
    "blockskip-40": (0.7171, 0.8034, 0.3194),
    "blockskip-50": (0.6963, 0.7877, 0.3184),
    "resize": (0.7164, 0.8044, 0.3176),
    "patches": (0.7253, 0.8099, 0.3196),
    "patches-high-to-low": (0.7184, None, None),
    "patches-random": (0.7201, None, None),
    "skip-30-no-residual": (0.4313, None, None),
    "skip-40-no-residual": (0.4338, None, None),
    "skip-50-no-residual": (0.4301, None, None),
    "skip-30": (0.7282, None, None),
    "skip-40": (0.7303, None, None),
    "skip-50": (0.7150, 0.8035, 0.3182),
    "front-50": (0.6651, 0.7646, 0.3193),
    "tail-50": (0.4808, 0.7111, 0.3090),
}
SANA: dict[str, tuple[float | None, ...]] = {
    "lora": (0.7374, 0.8108, 0.3254),
    "blockskip-30": (0.7388, 0.8043, 0.3240),
    "blockskip-50": (0.7308, None, None),
    "lisa": (0.7121, None, None),
    "lora-fa": (0.6268, None, None),
}
#: The paper's figures by the model of a file; files are called ``MODEL.jsonl`` or ``MODEL-anything.jsonl``.
PUBLISHED = {"builtin-sana": SANA, "builtin": FLUX}
#: Pairs of settings of which the first is published as the better one; ``close``: they differ by less than a hundredth.
ORDERS = (
    ("skip-30", "skip-30-no-residual"), ("skip-40", "skip-40-no-residual"), ("skip-50", "skip-50-no-residual"),
    ("skip-50", "front-50"), ("skip-50", "tail-50"), ("front-50", "tail-50"),
    ("patches", "resize"), ("patches", "patches-random"), ("patches-random", "patches-high-to-low"),
    ("patches", "patches-high-to-low"), ("blockskip-30", "blockskip-40"), ("blockskip-40", "blockskip-50"),
    ("blockskip-30", "blockskip-50"), ("lora", "blockskip-30"), ("blockskip-30", "lora"), ("lora", "blockskip-50"),
    ("lisa", "lora"), ("lora", "lisa"), ("lora", "lora-fa"), ("blockskip-30", "hollow-30"),
)  # fmt: skip
CLOSE = 0.01
#: How a document begins that is not there yet.
HEAD = "# The paper's tables, and ours\n\nThe protocol is in [benchmark.md](benchmark.md).\n"


@dataclass(frozen=True)
class Order:
    """A published order of two settings, and ours by one measure.

    Args:
        first, second: settings; the first is published as the better one.
        published: by how much (DINO).
        found: the first here, with its paired difference from the second.
    """

    first: str
    second: str
    published: float
    found: Measured

    @property
    def verdict(self) -> str:
        """``agrees``, ``does not agree``, or that the interval has both signs."""
        if self.found.low is None or self.found.high is None:
            return "one subject: no interval"
        if self.found.low > 0:
            return "agrees"
        if self.found.high < 0:
            return "does not agree"
        return "cannot be told" + (" (published as close)" if self.published < CLOSE else "")


def orders(lines: Lines, published: dict[str, tuple[float | None, ...]], measure: str) -> list[Order]:
    """Every published order of two settings that both are in the file."""
    found = []
    for first, second in ORDERS:
        if first not in published or second not in published:
            continue
        ours = lines.measured(measure, first, second) if first in lines.runs else None
        ahead = float(published[first][0] or 0) - float(published[second][0] or 0)
        if ours is not None and ours.difference is not None and ahead > 0:
            found.append(Order(first, second, ahead, ours))
    return found


def order_table(table: Table, published: dict[str, tuple[float | None, ...]]) -> list[str]:
    """The orders by subject fidelity and by held-out loss."""
    measures = main_measures(table)
    rows: dict[tuple[str, str], list[str]] = {}
    for measure in measures:
        for order in orders(table.lines, published, measure):
            names = " > ".join(SETTINGS[name].title for name in (order.first, order.second))
            cells = rows.setdefault((order.first, order.second), [names, f"{order.published:+.4f}"])
            cells += [_with_interval(order.found), order.verdict]
    heads = ["published order", "published (DINO)"]
    for measure in measures:
        heads += [title_of(table, measure), ""]
    return in_markdown(heads, [row for row in rows.values() if len(row) == len(heads)])


def figure_table(table: Table, published: dict[str, tuple[float | None, ...]]) -> list[str]:
    """Published figures beside ours, for every setting that either has."""
    measures = main_measures(table)
    heads = ["setting", "DINO", "CLIP-I", "CLIP-T", *(title_of(table, measure) for measure in measures)]
    rows = []
    for name, setting in SETTINGS.items():
        if name not in published and name not in table.lines.runs:
            continue
        theirs = published.get(name, (None, None, None))
        ours = [table.lines.measured(m, name) if name in table.lines.runs else None for m in measures]
        rows.append([setting.title, *("–" if value is None else f"{value:.4f}" for value in theirs),
                     *("–" if found is None else f"{found.mean:.2f}" for found in ours)])  # fmt: skip
    return in_markdown(heads, rows)


def main_measures(table: Table) -> list[str]:
    """Subject fidelity and held-out loss at the full resolution, as far as the file has them."""
    wanted = [f"share:{name}:drawable" for name in table.lines.encoders[:1]]
    wanted += [f"heldout:{side}" for side in table.lines.sizes[:1]]
    known = {measure.name for measure in table.measures}
    return [name for name in wanted if name in known]


def title_of(table: Table, measure: str) -> str:
    """The head of a measure's column."""
    return next(item.title for item in table.measures if item.name == measure)


def section(model: str, lines: Lines) -> list[str]:
    """The three tables of a file."""
    table = Table.of(lines)
    published = next((figures for name, figures in PUBLISHED.items() if model.startswith(name)), FLUX)
    return [
        table.markdown(), "", "Published (on the model itself, 30 subjects) beside ours:", "",
        *figure_table(table, published), "",
        f"Orders, with the paired difference of the first from the second and its 95% interval "
        f"({SETTINGS[REFERENCE].title} is the unit):", "",
        *order_table(table, published),
    ]  # fmt: skip


def filled(text: str, folder: Path = FOLDER) -> str:
    """The document with the tables of every file between its marks, ``<!-- builtin -->``, made anew.

    A file without marks gets them at the end, below a heading.
    """
    for path in sorted(folder.glob("*.jsonl")):
        begin, end = f"<!-- {path.stem} -->\n", f"\n<!-- /{path.stem} -->"
        if begin not in text:
            text += f"\n## {path.stem}\n\n{begin}{end}\n"
        start = text.index(begin) + len(begin)
        text = text[:start] + "\n".join(section(path.stem, Lines.read(path))) + text[text.index(end, start) :]
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare or write; the exit status is 1 where the document is not what the files give."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.results", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--update", action="store_true", help="write the tables anew")
    options = parser.parse_args(arguments)
    text = DOCUMENT.read_text(encoding="utf-8") if DOCUMENT.is_file() else HEAD
    made = filled(text)
    if options.update:
        DOCUMENT.write_text(made, encoding="utf-8")
    elif made != text:
        print("docs/results.md is not what the files give; run with --update.")
        return 1
    return 0


def _with_interval(found: Measured) -> str:
    assert found.difference is not None
    if found.low is None or found.high is None:
        return f"{found.difference:+.2f}"
    return f"{found.difference:+.2f} ({found.low:+.2f} to {found.high:+.2f})"


if __name__ == "__main__":
    raise SystemExit(main())
