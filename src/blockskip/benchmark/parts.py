"""What a benchmark is made of: parts that can be done one by one, each known by everything that it depends on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blockskip.benchmark.instruments import encoder_names
from blockskip.benchmark.model import Model
from blockskip.benchmark.settings import Setting
from blockskip.benchmark.subjects import OTHER_PROMPTS, Subject
from blockskip.benchmark.trained import PLACES, configured
from blockskip.keys import file_sha256, key

#: The row of the model as it is.
BASE = "base"


@dataclass
class Part:
    """The base model on other prompts (``others``), on a subject (``base``), or a setting on a subject (``run``).

    Args:
        name: what it is, for people.
        key: of everything that its result depends on.
        folder: where it is done.
        task: for ``worker.work``.
        needs: parts that have to be done before.
        row: what its line in the results has beside what was measured.
    """

    kind: str
    name: str
    key: str
    folder: Path
    task: dict[str, Any] = field(default_factory=dict)
    needs: list[Part] = field(default_factory=list)
    row: dict[str, Any] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        """Whether its result is there."""
        return self.result() is not None

    def result(self) -> dict[str, Any] | None:
        """What was measured, or None."""
        try:
            found: dict[str, Any] = json.loads((self.folder / "result.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if found.get("key") == self.key else None


def parts(model: Model, settings: Sequence[Setting], subjects: Sequence[Subject]) -> list[Part]:
    """All parts in the order in which they are done: subject by subject, the base before the settings."""
    request, root = model.request, model.request.folder
    drawing = _drawing(model)
    encoders = list(encoder_names(request))
    others_key = key("benchmark", {"what": "others", **drawing, "prompts": list(OTHER_PROMPTS)})
    others = Part("others", "the base on other prompts", others_key, root / "base" / f"others-{others_key[:8]}")
    found = [others]
    for subject in subjects:
        identity = subject.identity()
        drawn = key("benchmark", {
            "what": "base", **drawing, "subject": identity, "images": request.images,
            "sizes": [list(size) for size in model.loss_sizes],
        })  # fmt: skip
        base_key = key("benchmark", {"what": "measured", "drawn": drawn, "encoders": encoders})
        about = {
            "set": request.which if request.subjects_from is None else "own",
            "subject": subject.name,
            "pictures": {name: identity[name] for name in ("train", "heldout")},
            "caption": subject.caption,
            "prompts": [prompt.text for prompt in subject.prompts],
            "images": request.images,
            "encoders": encoders,
            "drawing": drawing,
            "model": {"path": request.model, "revision": request.revision, "identity": list(model.identity)},
        }
        base = Part(
            "base", f"the base, {subject.name}", base_key, root / "base" / f"{subject.name}-{drawn[:8]}",
            row={"setting": BASE, "title": "base model", **about},
        )  # fmt: skip
        found.append(base)
        for seed in request.seeds:
            found += [_run(model, setting, subject, seed, others, base, about) for setting in settings]
    for part in found:
        part.task = {"kind": part.kind, "key": part.key, "folder": str(part.folder), "request": request.as_json(),
                     **part.task}  # fmt: skip
        if part.kind == "base":
            part.task["subject"] = next(s for s in subjects if s.name == part.row["subject"]).as_json()
    return found


def _run(
    model: Model, setting: Setting, subject: Subject, seed: int, others: Part, base: Part, about: dict[str, Any]
) -> Part:
    request = model.request
    values = configured(model, setting, subject, seed)
    places = {name: file_sha256(Path(str(values[name]))) for name in ("skip.selection",) if name in values}
    kept = {name: value for name, value in values.items() if name not in PLACES} | places
    trained = key("benchmark", {
        "what": "training", "values": kept, "subject": subject.identity(), "model": list(model.identity),
    })  # fmt: skip
    drawing = key(
        "benchmark", {"what": "drawing", **_drawing(model), "images": request.images, "base": base.folder.name}
    )
    result = key("benchmark", {
        "what": "run", "trained": trained, "drawing": drawing, "others": others.key, "base": base.key,
        "points": request.points,
    })  # fmt: skip
    return Part(
        "run",
        f"{setting.name}, {subject.name}" + (f", seed {seed}" if len(request.seeds) > 1 else ""),
        result,
        request.folder / "runs" / setting.name / f"{subject.name}-seed{seed}-{trained[:8]}",
        {"subject": subject.as_json(), "setting": setting.name, "seed": seed, "others": str(others.folder),
         "base": str(base.folder), "drawing": drawing[:8]},
        [others, base],
        {"setting": setting.name, "title": setting.title, "seed": seed, **about},
    )  # fmt: skip


def _drawing(model: Model) -> dict[str, Any]:
    """Everything that pictures of prompts and the held-out loss depend on, but for the adapter and the prompts."""
    request = model.request
    return {
        "model": list(model.identity), "size": list(model.size), "steps": request.steps,
        "guidance_scale": request.guidance_scale, "text_length": model.text_length, "batch_size": request.batch_size,
        "dtype": str(model.dtype), "device": model.device.type, "base_adapters": list(model.adapters().identity()),
    }  # fmt: skip
