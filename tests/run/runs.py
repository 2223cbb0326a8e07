"""Whole runs of tiny models, in this process, and what they wrote."""

import json
import tomllib
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors import safe_open
from safetensors.torch import load_file

import blockskip
from blockskip.run import Prepared, RunResult, prepare
from blockskip.settings import SHORT, from_flat
from blockskip.store.groups import GroupStore

PROMPT = "a photo of sks dog"

#: Small enough for a second, with everything on that could make two runs differ.
SETTINGS: dict[str, Any] = {
    "prompt": PROMPT,
    "data__full_resolution": 64,
    "data__resolution": 32,
    "data__text_length": 12,
    "lora__rank": 4,
    "lora__dropout": 0.1,
    "train__steps": 4,
    "train__gradient_accumulation_steps": 2,
    "train__learning_rate": 1e-2,
    "train__lr_scheduler": "cosine",
    "train__lr_warmup_steps": 2,
}


@dataclass
class Run:
    """A run's folder and result; what is read from the folder is read when it is asked for."""

    output: Path
    result: RunResult | None = None

    @property
    def adapter(self) -> bytes:
        """The bytes of the LoRA file."""
        return self.file.read_bytes()

    @property
    def file(self) -> Path:
        """The LoRA file."""
        return self.output / "adapter" / "pytorch_lora_weights.safetensors"

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Of the LoRA file."""
        return load_file(self.file)

    @property
    def header(self) -> dict[str, str]:
        """Of the LoRA file."""
        with safe_open(self.file, framework="pt") as stored:
            return dict(stored.metadata())

    @property
    def metrics(self) -> bytes:
        """The bytes of ``metrics.jsonl``."""
        return (self.output / "metrics.jsonl").read_bytes()

    @property
    def entries(self) -> list[dict[str, float]]:
        """The lines of ``metrics.jsonl``."""
        return [json.loads(line) for line in self.metrics.splitlines()]

    @property
    def config(self) -> dict[str, Any]:
        """``config.toml``."""
        return tomllib.loads((self.output / "config.toml").read_text(encoding="utf-8"))

    def state(self, step: int) -> dict[str, bytes]:
        """The files of a checkpoint: adapter and optimiser with all their bytes, the manifest with its fingerprint."""
        folder = self.output / "checkpoints" / f"step-{step:06d}"
        return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}

    @property
    def files(self) -> dict[str, bytes]:
        """Every file of the folder."""
        paths = sorted(path for path in self.output.rglob("*") if path.is_file())
        return {path.relative_to(self.output).as_posix(): path.read_bytes() for path in paths}


class Runs:
    """Does runs of one model with one folder of pictures, each in a folder of its own."""

    def __init__(self, root: Path, model: Path, images: Path) -> None:
        self.root, self.model, self.images = root, model, images
        self._done: dict[str, Run] = {}
        self._count = 0

    def settings(self, **changes: Any) -> dict[str, Any]:
        """Arguments of ``blockskip.train``: those above, changed."""
        return {"model": self.model, "images": self.images, **SETTINGS, **changes}

    def prepared(self, output: Path, **changes: Any) -> Prepared:
        """The run with these changes, checked and not begun."""
        given = self.settings(output=output, **changes)
        values = {SHORT.get(name, name.replace("__", ".")): value for name, value in given.items()}
        return prepare(from_flat({name: str(v) if isinstance(v, Path) else v for name, v in values.items()}))

    def folder(self) -> Path:
        """A new output folder; it does not exist yet."""
        self._count += 1
        return self.root / f"{self._count:03d}"

    def __call__(
        self, output: Path | None = None, *, report: bool = False, planned: bool = False, **changes: Any
    ) -> Run:
        """Do a run, or continue the one in ``output``; without report and plan, each of which takes as long as it."""
        output = output or self.folder()
        settings = self.settings(output=output, **changes)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "[0-9]+ groups are too few")
            with ExitStack() as left_out:
                if not report:
                    left_out.enter_context(patch("blockskip.run.api.write_run_report"))
                if not planned:
                    left_out.enter_context(patch("blockskip.run.job.plan_run", lambda prepared: None))
                return Run(output, blockskip.train(**settings))

    def once(self, **changes: Any) -> Run:
        """The same, but runs with the same changes are done once; read its folder only."""
        name = repr(sorted(changes.items()))
        if name not in self._done:
            self._done[name] = self(**changes)
        return self._done[name]


class Written:
    """Counts the groups that are written to stores, by the name of the store's folder."""

    def __init__(self) -> None:
        self.keys: dict[str, list[str]] = {}

    def __enter__(self) -> "Written":
        original = GroupStore.write

        def write(store: GroupStore, key: str, *args: Any, **kwargs: Any) -> int:
            self.keys.setdefault(store.path(key).parent.name, []).append(key)
            return original(store, key, *args, **kwargs)

        self._patch = patch.object(GroupStore, "write", write)
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()

    @property
    def counts(self) -> tuple[int, int, int]:
        """How many texts, groups of latents and groups of features were written."""
        text, pixels, features = (len(self.keys.get(name, [])) for name in ("text", "pixels", "features"))
        return text, pixels, features
