"""The split that `blockskip select` found for a model, read from its result file."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blockskip.errors import UserError
from blockskip.method.selection import best_split
from blockskip.method.split import Split, skipped_count

KEY = "skip.selection"
#: Number of the file's format.
FORMAT = 1


def selected_split(path: str, family: str, blocks: Sequence[int], ratio: float) -> Split:
    """Eq. 2's choice for a ratio, from the sweeps in a result file.

    Args:
        path: the file ``selection.json``, or the folder it lies in.
        family: the model's architecture.
        blocks: how many blocks each of the transformer's lists has.
        ratio: share of all blocks that is skipped.

    Raises:
        UserError: the file cannot be read, is of another model, or its sweeps are too short for the ratio.
        ValueError: the ratio leaves no block.
    """
    file = Path(path).expanduser()
    file = file / "selection.json" if file.is_dir() else file
    start = f'{KEY} = "{path}"'
    try:
        document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        found = document["format"], str(document["family"]), [int(count) for count in document["blocks"]]
        sweeps = [[0.0, *(float(entry["mean"]) for entry in document["distances"][end])] for end in ("front", "back")]
        if not all(math.isfinite(value) for sweep in sweeps for value in sweep):
            raise ValueError("a distance is not a number")
    except OSError as error:
        raise UserError(
            f"{start} cannot be read ({error.strerror}); give the file that `blockskip select` wrote."
        ) from None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise UserError(f"{start} is no result of `blockskip select`, or is damaged; run the command again.") from None
    if found[0] != FORMAT:
        raise UserError(f"{start} was written by another version of blockskip; run `blockskip select` again.")
    if found[1:] != (family, list(blocks)):
        theirs, ours = (
            f"{name} with {' + '.join(str(count) for count in counts)} blocks"
            for name, counts in (found[1:], (family, blocks))
        )
        raise UserError(f"{start} is of {theirs}, the model is {ours}; run `blockskip select` with this model.")
    count = skipped_count(ratio, sum(blocks))
    try:
        return best_split(*sweeps, count)
    except ValueError:
        most = min(len(sweep) for sweep in sweeps) - 1
        raise UserError(
            f"{start} holds sweeps of up to {most} blocks, and skip.ratio = {ratio} skips {count}; "
            f"run `blockskip select --ratios {ratio}`."
        ) from None
