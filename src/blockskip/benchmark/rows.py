"""The lines of a benchmark as numbers: one value a picture for each measure, scaled, and compared in pairs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from blockskip.benchmark.parts import BASE
from blockskip.benchmark.settings import REFERENCE
from blockskip.errors import UserError
from blockskip.evaluation.fidelity import SMALLEST_SPAN
from blockskip.evaluation.intervals import Values, interval, resampled_means

#: A subject and the seed of a training.
Place = tuple[str, int]


@dataclass(frozen=True)
class Measured:
    """A measure of one setting: its mean, and its paired difference from a reference.

    Args:
        mean: over the subjects.
        difference: the mean of setting minus reference on the same subject, prompt and seed; None without one.
        low, high: ends of its 95% interval; None with fewer than two subjects.
        subjects: how many there are.
    """

    mean: float
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    subjects: int = 0


@dataclass
class Lines:
    """The lines of a file, by setting and place.

    Args:
        runs: ``{setting: {(subject, seed): line}}``, settings in the order of the file.
        base: the base model's line by subject.
    """

    runs: dict[str, dict[Place, dict[str, Any]]] = field(default_factory=dict)
    base: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Lines:
        """Of a file that ``blockskip benchmark`` wrote.

        Raises:
            UserError: it is not there, or is none.
        """
        found = cls()
        try:
            for line in path.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                if row["setting"] == BASE:
                    found.base[row["subject"]] = row
                else:
                    found.runs.setdefault(row["setting"], {})[row["subject"], row["seed"]] = row
        except OSError as error:
            raise UserError(f'"{path}" cannot be read: {error.strerror}; give a results.jsonl.') from None
        except (ValueError, KeyError, TypeError):
            raise UserError(f'"{path}" is no file of results; give the results.jsonl of a benchmark.') from None
        return found

    @property
    def encoders(self) -> list[str]:
        """Names of the encoders, the table's first."""
        return list(next(iter(self.base.values()))["fidelity"]) if self.base else []

    @property
    def sizes(self) -> list[str]:
        """Sizes of the held-out loss: the full resolution, then what is drawn."""
        return list(next(iter(self.base.values()))["heldout"]) if self.base else []

    def heldout_share(self, row: dict[str, Any], size: str, losses: Sequence[float] | None = None) -> float | None:
        """Of plain LoRA's improvement over the base on the same subject and seed; None while that is not known.

        Args:
            losses: other losses than those at the row's end.
        """
        plain = self.runs.get(REFERENCE, {}).get((row["subject"], row["seed"]))
        base = self.base.get(row["subject"])
        if plain is None or base is None:
            return None
        before, learnt = float(np.mean(base["heldout"][size])), float(np.mean(plain["heldout"][size]))
        now = float(np.mean(row["heldout"][size] if losses is None else losses))
        return (before - now) / (before - learnt) if before > learnt else None

    def fidelity_share(self, subject: str, encoder: str, kind: str, values: Sequence[float]) -> list[float] | None:
        """(cosine - floor) / (ceiling - floor) of pictures of a subject; None where floor and ceiling are too near."""
        base = self.base.get(subject)
        if base is None:
            return None
        floor, top = float(np.mean(base["fidelity"][encoder][kind])), base["ceiling"]["fidelity"][encoder][kind]
        return [(value - floor) / (top - floor) for value in values] if top - floor >= SMALLEST_SPAN else None

    def values(self, measure: str, row: dict[str, Any]) -> list[float] | None:
        """The values of a measure in one line, one a picture.

        Args:
            measure: ``heldout:SIZE``, ``share:ENCODER:KIND``, ``cosine:ENCODER:KIND``, ``prompt``, ``background`` or
                ``drift:ENCODER``.
        """
        name, *about = measure.split(":")
        if name == "heldout":
            share = self.heldout_share(row, about[0])
            return None if share is None else [share]
        if name == "share":
            return self.fidelity_share(row["subject"], about[0], about[1], row["fidelity"][about[0]][about[1]])
        if name == "cosine":
            return list(row["fidelity"][about[0]][about[1]])
        return row["drift"][about[0]] if name == "drift" else row[name]

    def measured(self, measure: str, setting: str, reference: str = REFERENCE) -> Measured | None:
        """A measure over all subjects on which it is known; None where there is none.

        The mean is of the subjects' means. The interval is of resampled subjects and, inside each, pictures.

        Args:
            reference: what the difference is from, on the same subjects, prompts and seeds.
        """
        own = self._known(measure, setting)
        if not own:
            return None
        by_subject = _by_subject(own)
        mean = float(np.mean([np.mean(values) for values in by_subject.values()]))
        pairs = {
            place: [a - b for a, b in zip(own[place], values, strict=True)]
            for place, values in self._known(measure, reference).items()
            if place in own
        }
        if not pairs or setting == reference:
            return Measured(mean, subjects=len(by_subject))
        return Measured(mean, *paired(list(_by_subject(pairs).values())), subjects=len(by_subject))

    def _known(self, measure: str, setting: str) -> dict[Place, list[float]]:
        found = {place: self.values(measure, row) for place, row in self.runs.get(setting, {}).items()}
        return {place: values for place, values in found.items() if values}


def _by_subject(values: dict[Place, list[float]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for (subject, _), some in sorted(values.items()):
        found.setdefault(subject, []).extend(some)
    return found


def paired(differences: Sequence[Sequence[float]]) -> tuple[float, float | None, float | None]:
    """(mean, low, high) of differences by subject and picture: the mean of the subjects' means and its 95% interval.

    With one subject there is no interval. Subjects with fewer pictures than others take those repeatedly.
    """
    mean = float(np.mean([np.mean(some) for some in differences]))
    if len(differences) < 2:
        return mean, None, None
    length = max(map(len, differences))
    values: Values = np.array([np.resize(np.asarray(some, dtype=np.float64), length) for some in differences])
    low, high = interval(resampled_means(values))
    return mean, float(low), float(high)
