"""What ``blockskip benchmark`` is asked for, checked before a model is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from blockskip import builtin
from blockskip.benchmark.settings import QUICK
from blockskip.errors import UserError
from blockskip.precision import DTYPES
from blockskip.settings import leaves

SETS = ("development", "test")
#: Settings of a training that the protocol itself fixes.
FIXED = (
    "output", "model.path", "model.revision", "model.transformer", "model.dtype", "data.images", "data.prompt",
    "data.resolution", "patches.direction", "train.seed", "train.device", "train.checkpoint_every",
    "train.checkpoints_total_limit",
)  # fmt: skip
FIXED_SECTIONS = ("skip.", "preview.", "memory.", "data.class")
#: The training of every setting on a built-in model, where the user sets nothing else. Steps and learning rate were
#: chosen on development subjects (docs/benchmark.md): longer or faster, the held-out loss rises again.
BUILTIN_TRAINING: dict[str, Any] = {
    "train.steps": 200,
    "train.batch_size": 4,
    "train.gradient_accumulation_steps": 1,
    "train.learning_rate": 1e-3,
}
#: What ``--quick`` takes instead.
QUICK_STEPS = 60


@dataclass(frozen=True)
class Request:
    """Everything that a benchmark depends on, and where it goes. Plain values, so that it can be sent to a process.

    Args:
        model, revision, transformer, device, dtype: as of a run.
        settings: rows by name (``benchmark.settings``); plain LoRA is always among them.
        subjects: built-in subjects, or folders' names below ``subjects_from``; none: the first ``count``.
        count: how many subjects; None takes all.
        which: set of the built-in subjects.
        subjects_from: a folder with a folder of pictures for each subject.
        caption: of their training pictures; ``{}`` stands for the class.
        seeds: of the trainings: each is one more run of every setting on every subject.
        images: pictures of each prompt.
        points: how many times before its end a run is looked at.
        encoders: of subject fidelity; none: those of the package that are installed.
        selection: a result of ``blockskip select``, for rows that skip where the model has it; None: its preset.
        training: settings of every training by dotted key.
        steps, guidance_scale, height, width: of the sampler; None takes the model's own.
        batch_size: pictures that are drawn together.
        output: the folder.
    """

    model: str = "builtin"
    revision: str | None = None
    transformer: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    settings: tuple[str, ...] = ("core",)
    subjects: tuple[str, ...] = ()
    count: int | None = 6
    which: str = "development"
    subjects_from: str | None = None
    caption: str = "a photo of sks {}"
    seeds: tuple[int, ...] = (0,)
    images: int = 2
    points: int = 3
    encoders: tuple[str, ...] = ()
    selection: str | None = None
    training: Mapping[str, Any] = field(default_factory=dict)
    steps: int | None = None
    guidance_scale: float | None = None
    height: int | None = None
    width: int | None = None
    batch_size: int = 16
    output: str = "benchmark"

    @property
    def folder(self) -> Path:
        """Of everything that is written."""
        return Path(self.output).expanduser()

    def as_json(self) -> dict[str, Any]:
        """Plain values; ``from_json`` is the inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Request:
        """Of ``as_json``."""
        return cls(**{name: tuple(v) if isinstance(v, list) else v for name, v in document.items()})

    def check(self) -> list[str]:
        """Sentences about what cannot be used, whatever the model."""
        found = []
        for name, value, least in (
            ("count", self.count, 1), ("images", self.images, 1), ("points", self.points, 0),
            ("batch-size", self.batch_size, 1), ("num-inference-steps", self.steps, 1),
            *(("seeds", seed, 0) for seed in self.seeds),
        ):  # fmt: skip
            if value is not None and value < least:
                found.append(f"--{name} must be at least {least}, not {value}.")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            found.append("--seeds must be whole numbers, each once, 0 1 2 for example.")
        if self.which not in SETS:
            found.append(f'--set "{self.which}" is not one of {", ".join(SETS)}.')
        if self.dtype != "auto" and self.dtype not in DTYPES:
            found.append(f'--dtype "{self.dtype}" is not one of auto, {", ".join(DTYPES)}.')
        if self.subjects_from is None and self.model not in builtin.MODELS:
            found.append("--subjects-from is missing: only the built-in models bring subjects; give a folder of them.")
        if self.subjects_from is not None and self.which != "development":
            found.append(f"--set {self.which} is of the built-in subjects and --subjects-from of your own; leave one.")
        known = leaves()
        for name in self.training:
            if name not in known:
                found.append(f'--config: "{name}" is not a setting.')
            elif name in FIXED or name.startswith(FIXED_SECTIONS):
                found.append(f"--config: {name} cannot be set here: the protocol or the row decides it.")
        return found

    def training_of(self) -> dict[str, Any]:
        """Settings of every training by dotted key: those asked for, over ours for a built-in model."""
        return {**(BUILTIN_TRAINING if self.model in builtin.MODELS else {}), **self.training}


def quick(request: Request) -> Request:
    """The same in ten minutes: two subjects, three settings, few steps; what it shows is that everything works."""
    training = {**request.training, "train.steps": request.training.get("train.steps", QUICK_STEPS)}
    changed = {"settings": QUICK, "count": 2, "images": 1, "points": 1, "training": training}
    return Request(**{**request.__dict__, **changed})


def checked(request: Request) -> Request:
    """The request.

    Raises:
        UserError: something in it cannot be used, whatever the model.
    """
    if problems := request.check():
        raise UserError(problems)
    return request
