"""What a run took, kept in ``phases.json`` so that a continued run, and whoever reads a finished one, has all of it."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from blockskip.measure import Meter, PhaseRecord, from_json, to_json
from blockskip.store.files import write_atomically


class Records:
    """Memory and seconds by phase, the largest size of the cache, and the memory before the first phase.

    Args:
        path: the file.
        device: whose memory is measured.
    """

    def __init__(self, path: Path, device: torch.device) -> None:
        self.path = path
        self.meter = Meter(device)
        self.meter.baseline()
        self.baseline_bytes = self.meter.baseline_bytes
        self.cache_bytes = 0

    def restore(self) -> None:
        """Add what earlier processes of the run took; from a damaged file nothing is taken."""
        try:
            document = json.loads(self.path.read_text(encoding="utf-8"))
            phases, cache = from_json(json.dumps(document["phases"])), int(document["cache_bytes"])
            baseline = int(document["baseline_bytes"])
        except (OSError, ValueError, TypeError, KeyError):
            return
        self.meter.merge(phases)
        self.cache_bytes, self.baseline_bytes = max(self.cache_bytes, cache), baseline

    def save(self) -> None:
        """Write the file."""
        document = {
            "phases": json.loads(to_json(self.meter.records())),
            "cache_bytes": self.cache_bytes,
            "baseline_bytes": self.baseline_bytes,
        }
        text = json.dumps(document, indent=1)
        write_atomically(self.path, lambda path: path.write_text(text, encoding="utf-8"))

    @property
    def phases(self) -> list[PhaseRecord]:
        """One record a phase."""
        return self.meter.records()
