"""What block selection found on the built-in models: docs/selection.md's tables from ``selections/*.json``.

    blockskip select --model builtin --validate 0.5 --output benchmarks/selections/builtin.json
    blockskip select --model builtin-sana --validate 0.5 --output benchmarks/selections/builtin-sana.json
    python -m benchmarks.selections --update

Without ``--update`` the document is compared with the files.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_suffix("")
DOCUMENT = Path(__file__).parent.parent / "docs" / "selection.md"
MODELS = ("builtin", "builtin-sana")


def read(model: str) -> dict[str, Any]:
    """The result of ``blockskip select`` on a built-in model."""
    found: dict[str, Any] = json.loads((FOLDER / f"{model}.json").read_text(encoding="utf-8"))
    return found


def splits(found: dict[str, Any]) -> list[str]:
    """Chosen splits by ratio, beside those of the other probe and those that scale the paper's."""
    lines = [
        "| ratio | skipped | chosen (front, tail) | in resamples | next best | by velocity | scaled from FLUX.1 |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for entry in found["splits"]:
        own = f"{entry['front']}, {entry['tail']}"
        others = {pair: share for pair, share in entry["chosen_in"].items() if pair != own}
        following = ", ".join(f"({pair}) {share:.0%}" for pair, share in list(others.items())[:1]) or "none"
        velocity = "({}, {})".format(*entry["other_probes"]["velocity"])
        scaled = "({}, {})".format(*entry["paper_shares"])
        lines.append(
            f"| {entry['ratio']:.0%} | {entry['skipped']} | **({own})** | {entry['chosen_in'].get(own, 0.0):.0%} "
            f"| {following} | {velocity} | {scaled} |"
        )
    return lines


def windows(found: dict[str, Any]) -> list[str]:
    """Distance by the place of the sliding window, with its interval, and the other probe's beside it."""
    velocity = {entry["number"]: entry for entry in found["other_probes"]["velocity"]["window"]}
    lines = ["| blocks without text | distance of the pictures | change of velocity |", "| --- | --- | --- |"]
    for entry in found["distances"]["window"]:
        first, last = entry["blocks"][0], entry["blocks"][-1]
        other = velocity[entry["number"]]
        lines.append(
            f"| {first}-{last} | {entry['mean']:.3f} ({entry['low']:.3f}-{entry['high']:.3f}) "
            f"| {other['mean']:.3f} ({other['low']:.3f}-{other['high']:.3f}) |"
        )
    return lines


def agreement(found: dict[str, Any]) -> list[str]:
    """Rank correlation of velocity with the pictures, and of attention with both."""
    attention = found["attention"]
    values = {
        "velocity, with pictures": found["agreement"]["velocity"],
        **{f"attention to {attention['to']}, with {name}": rho for name, rho in attention["agreement"].items()},
    }
    columns = list(dict.fromkeys(name for row in values.values() for name in row))
    lines = ["| Spearman's rho | " + " | ".join(columns) + " |", "| " + " | ".join(["---"] * (len(columns) + 1)) + " |"]
    for label, row in values.items():
        cells = ("" if row.get(name) is None else f"{row[name]:.2f}" for name in columns)
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return lines


def validation(found: dict[str, Any]) -> list[str]:
    """Held-out loss and fidelity after training with the chosen split and its neighbours."""
    values = found["validation"]
    names = values["subjects"]
    columns = ("split", *(f"loss, {name}" for name in names), "mean", *(f"fidelity, {name}" for name in names), "mean")
    lines = ["| " + " | ".join(columns) + " |", "| " + " | ".join("---" for _ in columns) + " |"]
    rows = sorted(values["splits"], key=lambda row: (row["front"], row["tail"]))
    for row in (*rows, values["plain"]):
        pair = f"({row['front']}, {row['tail']})" if "front" in row else "plain LoRA"
        cells = [f"**{pair}**, chosen" if [row.get("front"), row.get("tail")] == values["chosen"] else pair]
        cells += [f"{value:+.1%}" for value in (*row["heldout_change"], row["mean_heldout_change"])]
        cells += [f"{value:.3f}" for value in (*row["fidelity"], row["mean_fidelity"])]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


PARTS = {"splits": splits, "windows": windows, "agreement": agreement, "validation": validation}


def filled(text: str) -> str:
    """The document with every table between its marks, ``<!-- builtin splits -->``, made anew.

    Raises:
        ValueError: a mark is not there.
    """
    for model in MODELS:
        found = read(model)
        for name, part in PARTS.items():
            begin, end = f"<!-- {model} {name} -->\n", f"\n<!-- /{model} {name} -->"
            start = text.index(begin) + len(begin)
            text = text[:start] + "\n".join(part(found)) + text[text.index(end, start) :]
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare or write; the exit status is 1 where the document is not what the files give."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.selections", description=__doc__.splitlines()[0])
    parser.add_argument("--update", action="store_true", help="write the tables anew")
    options = parser.parse_args(arguments)
    text = DOCUMENT.read_text(encoding="utf-8")
    made = filled(text)
    if options.update:
        DOCUMENT.write_text(made, encoding="utf-8")
    elif made != text:
        print("docs/selection.md is not what the files give; run with --update.")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
