"""A plan from a setting, and from what a user names; plans are remembered."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import peft
import torch
import transformers

from blockskip import __version__
from blockskip.adapters.frozen import FrozenAdapters
from blockskip.keys import file_sha256
from blockskip.planner import phases
from blockskip.planner.parts import configs_of
from blockskip.planner.plan import Plan
from blockskip.planner.previews import preview
from blockskip.planner.setting import Setting
from blockskip.settings import to_flat

#: Settings that do not change what a run takes.
WITHOUT_WEIGHT = (
    "output",
    "data.images",
    "data.prompt",
    "data.class_images",
    "data.class_prompt",
    "features.cache",
    "model.path",
)


def make_plan(setting: Setting, remarks: tuple[str, ...] = (), *, remember: bool = True) -> Plan:
    """What every phase of a run takes.

    Args:
        remarks: sentences to keep with the plan.
        remember: take a plan that was made for the same setting before, and keep this one.
    """
    place = _memory(setting)
    if remember:
        try:
            document = json.loads(place.read_text(encoding="utf-8"))
            return Plan.from_json(document | {"remarks": list(remarks), "model": setting.source.name})
        except (OSError, ValueError, KeyError, TypeError):
            pass
    plan = _count(setting, remarks)
    if remember:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            temporary = place.with_name(f"{place.name}.{os.getpid()}")
            temporary.write_text(json.dumps(plan.as_json()), encoding="utf-8")
            temporary.replace(place)
        except OSError:
            pass  # the next plan is counted anew
    return plan


def _count(setting: Setting, remarks: tuple[str, ...]) -> Plan:
    adapters = FrozenAdapters(setting.config.model.base_adapters) if setting.config.model.base_adapters else None
    text_plan, text = _once("text", setting, phases.encode_text, ("data.text_length", "model.stream_text_encoders"))
    pictures = _once("pictures", setting, phases.encode_pictures, ("data.full_resolution", "train.batch_size"))
    features_plan, features = phases.precompute(setting, text, adapters)
    train, adapter = phases.train(setting, text, features, adapters)
    found = {
        "encode text": text_plan,
        "encode pictures": pictures,
        "precompute": features_plan,
        "train": train,
        "preview": preview(setting, text, text_plan, adapter),
        "save": phases.save(setting, adapter, train),
    }
    split = (setting.split.front, setting.split.tail)
    return Plan(
        setting.source.name, setting.device.type, str(setting.dtype).removeprefix("torch."), split, setting.num_blocks,
        _settings(setting), found, remarks,
    )  # fmt: skip


#: Results of phases that many plans of one process share: fitting to a budget changes one setting after another.
_known: dict[tuple[object, ...], Any] = {}


def _once(name: str, setting: Setting, count: Callable[[Setting], Any], keys: tuple[str, ...]) -> Any:
    """The result of a phase that depends on these keys, and on what is part of every plan."""
    flat = to_flat(setting.config)
    key = (
        name, str(setting.source.folder), setting.device.type, setting.dtype, setting.size, setting.groups,
        setting.captions, *(flat[item] for item in keys),
    )  # fmt: skip
    if key not in _known:
        _known[key] = count(setting)
    return _known[key]


def _settings(setting: Setting) -> dict[str, object]:
    flat = to_flat(setting.config)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in flat.items()}


def _memory(setting: Setting) -> Path:
    """Where the plan is remembered: named by everything it depends on."""
    settings = {name: repr(value) for name, value in _settings(setting).items() if name not in WITHOUT_WEIGHT}
    versions = [__version__, torch.__version__, diffusers.__version__, transformers.__version__, peft.__version__]
    stored = [str(phases.stored_dtype(setting.source, part)) for part in ("transformer", "vae")]
    document = [
        versions, [file_sha256(path) for path in configs_of(setting.source.folder)], settings, stored,
        str(setting.device.type), setting.size, setting.groups, setting.captions, setting.reference,
        type(setting.rule).__qualname__, _own_code(),
    ]  # fmt: skip
    name = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:32]
    folder = os.environ.get("BLOCKSKIP_CACHE")
    base = Path(folder) if folder else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "blockskip"
    return base / "plans" / f"{name}.json"


def _own_code() -> str:
    """The hash of the package's code: a changed kernel is counted anew."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
