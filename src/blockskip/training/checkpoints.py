"""Checkpoints: written whole or not at all, and the newest valid one found again."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from blockskip.keys import FORMATS, file_sha256
from blockskip.store.files import write_atomically
from blockskip.store.tensors import DamagedFile, read_tensors, write_tensors

NAME = re.compile(r"step-(\d{6,})")


@dataclass
class Checkpoint:
    """The state after a number of optimiser steps.

    Args:
        step: optimiser steps done.
        adapter: LoRA tensors by PEFT name, float32.
        optimizer: the optimiser's tensors (``training.optimizer.optimizer_state``).
        fingerprint: of the settings that must stay the same.
        skipped_steps: steps left out because their loss was not finite.
    """

    step: int
    adapter: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    fingerprint: dict[str, str]
    skipped_steps: int = 0


def save_checkpoint(folder: Path, checkpoint: Checkpoint, limit: int) -> Path:
    """Write ``folder/step-000500``: tensors first, then the manifest with their hash, then one rename.

    Args:
        limit: how many checkpoints are kept; 0 keeps all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{checkpoint.step:06d}"
    temporary = folder / f".{final.name}.{os.getpid()}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    tensors = {f"adapter.{name}": value.detach().cpu().contiguous() for name, value in checkpoint.adapter.items()}
    tensors |= {f"optimizer.{name}": value.detach().cpu().contiguous() for name, value in checkpoint.optimizer.items()}
    try:
        write_atomically(temporary / "state.safetensors", lambda path: write_tensors(path, tensors, {}))
        manifest = {
            "format": FORMATS["checkpoint"], "step": checkpoint.step, "skipped_steps": checkpoint.skipped_steps,
            "sha256": file_sha256(temporary / "state.safetensors"), "fingerprint": checkpoint.fingerprint,
        }  # fmt: skip
        document = json.dumps({**manifest, "manifest_sha256": _checksum(manifest)}, indent=1, sort_keys=True)
        write_atomically(temporary / "checkpoint.json", lambda path: _write_text(path, document))
        if final.exists():
            shutil.rmtree(final)
        temporary.replace(final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if limit:  # a later step that is still there is damaged, or this one would not have been trained
        kept = [path for step, path in _steps(folder) if step <= checkpoint.step][-limit:]
        for _, old in _steps(folder):
            if old not in kept:
                shutil.rmtree(old, ignore_errors=True)
    return final


def latest_checkpoint(folder: Path, only: int | None = None) -> Checkpoint | None:
    """The newest checkpoint that is whole; damaged ones and folders of other names are passed over.

    Args:
        only: the step of the one that is wanted; None takes the newest.
    """
    for temporary in folder.glob(".step-*.tmp"):
        shutil.rmtree(temporary, ignore_errors=True)
    for step, path in reversed(_steps(folder)):
        if only not in (None, step):
            continue
        try:
            manifest = json.loads((path / "checkpoint.json").read_text(encoding="utf-8"))
            if manifest.pop("manifest_sha256") != _checksum(manifest):
                continue
            if manifest["format"] != FORMATS["checkpoint"] or manifest["step"] != step:
                continue
            if manifest["sha256"] != file_sha256(path / "state.safetensors"):
                continue
            tensors, _ = read_tensors(path / "state.safetensors")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, DamagedFile):
            continue
        parts: dict[str, dict[str, torch.Tensor]] = {"adapter": {}, "optimizer": {}}
        for name, value in tensors.items():
            part, _, leaf = name.partition(".")
            parts[part][leaf] = value
        return Checkpoint(
            step, parts["adapter"], parts["optimizer"], manifest["fingerprint"], manifest["skipped_steps"]
        )
    return None


def _steps(folder: Path) -> list[tuple[int, Path]]:
    found = []
    for path in folder.glob("step-*"):
        match = NAME.fullmatch(path.name)
        if match and path.is_dir():
            found.append((int(match[1]), path))
    return sorted(found)


def _checksum(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
