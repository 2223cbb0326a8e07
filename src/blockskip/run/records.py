"""What a run took, kept in ``phases.json`` so that a continued run, and whoever reads a finished one, has all of it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch

from blockskip.measure import Meter, Peaks, PhaseRecord, from_json, to_json
from blockskip.report.content import Overrun
from blockskip.run.watch import Watch
from blockskip.store.files import write_atomically


class Records:
    """Memory and seconds by phase, planned and measured, the largest sizes on disk, and the memory before it all.

    Args:
        path: the file.
        device: whose memory is measured.
        watch: tells of the phases as they end.
    """

    def __init__(self, path: Path, device: torch.device, watch: Watch) -> None:
        self.path, self.watch = path, watch
        self.meter = Meter(device, watch.ended)
        self.meter.baseline()
        self.baseline_bytes = self.meter.baseline_bytes
        self.cache_bytes = self.written_bytes = 0  # the largest there have been

    def restore(self) -> None:
        """Add what earlier processes of the run took; from a damaged file nothing is taken."""
        try:
            document = json.loads(self.path.read_text(encoding="utf-8"))
            phases, cache = from_json(json.dumps(document["phases"])), int(document["cache_bytes"])
            baseline, written = int(document["baseline_bytes"]), int(document.get("written_bytes", 0))
            planned = {name: Peaks(**peaks) for name, peaks in document.get("planned", {}).items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return
        self.meter.merge(phases)
        self.watch.known(phases, planned)
        self.written_bytes = max(self.written_bytes, written)
        self.cache_bytes, self.baseline_bytes = max(self.cache_bytes, cache), baseline

    def save(self) -> None:
        """Write the file."""
        document = {
            "phases": json.loads(to_json(self.meter.records())),
            "planned": {name: dataclasses.asdict(peaks) for name, peaks in self.watch.planned.items()},
            "cache_bytes": self.cache_bytes,
            "written_bytes": self.written_bytes,
            "baseline_bytes": self.baseline_bytes,
        }
        text = json.dumps(document, indent=1)
        write_atomically(self.path, lambda path: path.write_text(text, encoding="utf-8"))

    def written(self, cache_bytes: int, found: int, cache: Path) -> None:
        """Count what lies on disk now: in the cache, and beside it in the run's folder.

        Args:
            cache_bytes: of everything in the cache.
            found: of that, what lay there before this run.
            cache: its folder.
        """
        paths = [path for path in self.path.parent.rglob("*") if cache not in path.parents and path.is_file()]
        others = sum(path.stat().st_size for path in paths)
        self.cache_bytes = max(self.cache_bytes, cache_bytes)
        self.written_bytes = max(self.written_bytes, max(0, cache_bytes - found) + others)
        self.watch.written(self.written_bytes)

    @property
    def overruns(self) -> list[Overrun]:
        """What took clearly more than its budget in the whole run."""
        return self.watch.overruns(self.phases, self.written_bytes)

    @property
    def phases(self) -> list[PhaseRecord]:
        """One record a phase."""
        return self.meter.records()
