"""A plan from a setting, and from what a user names; plans are remembered."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import diffusers
import peft
import torch
import transformers

from blockskip import __version__
from blockskip.adapters.frozen import FrozenAdapters
from blockskip.keys import file_sha256
from blockskip.loading.weights import cache_folder
from blockskip.planner import encoding, phases
from blockskip.planner.parts import configs_of, stored_dtype
from blockskip.planner.plan import PhasePlan, Plan
from blockskip.planner.previews import preview
from blockskip.planner.reuse import WITHOUT_WEIGHT, shared
from blockskip.planner.setting import Setting
from blockskip.settings import to_flat


def make_plan(setting: Setting, remarks: tuple[str, ...] = (), *, remember: bool = True, previews: bool = True) -> Plan:
    """What every phase of a run takes.

    Args:
        remarks: sentences to keep with the plan.
        previews: plan one picture where the run draws none; else that phase has no figures.
        remember: take a plan that was made for the same setting before, and keep this one.
    """
    previews = previews or bool(setting.config.preview.prompts)
    place = _memory(setting, previews)
    if remember:
        try:
            document = json.loads(place.read_text(encoding="utf-8"))
            return Plan.from_json(document | {"remarks": list(remarks), "model": setting.source.name})
        except (OSError, ValueError, KeyError, TypeError):
            pass
    plan = _count(setting, remarks, previews)
    if remember:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            temporary = place.with_name(f"{place.name}.{os.getpid()}")
            temporary.write_text(json.dumps(plan.as_json()), encoding="utf-8")
            temporary.replace(place)
        except OSError:
            pass  # the next plan is counted anew
    return plan


def _count(setting: Setting, remarks: tuple[str, ...], previews: bool) -> Plan:
    adapters = FrozenAdapters(setting.config.model.base_adapters) if setting.config.model.base_adapters else None
    encoders, text = shared("encode text", setting, lambda: encoding.text_encoders(setting))
    features_plan, features = shared("precompute", setting, lambda: phases.precompute(setting, text, adapters))
    trained = shared("train", setting, lambda: phases.train(setting, text, features, adapters))
    drawn = PhasePlan(used=False)
    if previews:
        drawn = shared("preview", setting, lambda: preview(setting, encoders, text))
    found = {
        "encode text": encoding.text_phase(setting, encoders, text),
        "encode pictures": shared("encode pictures", setting, lambda: encoding.encode_pictures(setting)),
        "precompute": features_plan,
        "train": phases.begun_often(setting, trained, features),
        "preview": drawn,
        "save": phases.save(setting, trained),
    }
    split = (setting.split.front, setting.split.tail)
    return Plan(
        setting.source.name, setting.device.type, str(setting.dtype).removeprefix("torch."), split, setting.num_blocks,
        _settings(setting), found, remarks,
    )  # fmt: skip


def _settings(setting: Setting) -> dict[str, object]:
    flat = to_flat(setting.config)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in flat.items()}


def _memory(setting: Setting, previews: bool) -> Path:
    """Where the plan is remembered: named by everything it depends on."""
    settings = {name: repr(value) for name, value in _settings(setting).items() if name not in WITHOUT_WEIGHT}
    versions = [__version__, torch.__version__, diffusers.__version__, transformers.__version__, peft.__version__]
    parts = ("transformer", "vae", *(encoder for _, encoder in setting.source.text_parts))
    stored = [str(stored_dtype(setting.source, part)) for part in parts]
    document = [
        versions, [file_sha256(path) for path in configs_of(setting.source.folder)], settings, stored,
        str(setting.device.type), setting.size, setting.groups, setting.captions, setting.reference,
        type(setting.rule).__qualname__, previews, _own_code(),
    ]  # fmt: skip
    name = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:32]
    return cache_folder() / "plans" / f"{name}.json"


def _own_code() -> str:
    """The hash of the package's code: a changed kernel is counted anew."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
