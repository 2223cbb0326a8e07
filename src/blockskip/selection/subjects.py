"""The tuned models of a selection: adapters that were given, or that are trained here on subjects."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockskip import builtin
from blockskip.adapters.files import FILE_NAME
from blockskip.adapters.frozen import FrozenAdapters
from blockskip.data.pictures import find_pictures
from blockskip.errors import UserError
from blockskip.progress import say
from blockskip.run import prepare, run
from blockskip.run.prepare import Prepared
from blockskip.selection.model import Model
from blockskip.selection.request import Request
from blockskip.settings import from_flat

#: Prompts of a subject that brings none.
PROMPTS = ("{}", "{} in the snow", "{} on a wooden table", "{} on the beach")
#: Of pictures: why they cannot be had.
UNKNOWN = "are not where data.images in the config.toml of its run says, or that says nothing"
#: Plain LoRA of a built-in model, where the user sets nothing else.
BUILTIN_TRAINING: dict[str, Any] = {
    "train.steps": 400,
    "train.batch_size": 4,
    "train.gradient_accumulation_steps": 1,
    "train.learning_rate": 2e-3,
    "train.checkpoint_every": 100,
}


@dataclass(frozen=True)
class Subject:
    """Something to personalise for.

    Args:
        name: of its folder.
        images: folder of its training pictures; None where only an adapter is known.
        caption: of each picture.
        prompts: to draw it with.
        heldout: real pictures of it that are never trained on; may be empty.
    """

    name: str
    images: Path | None
    caption: str
    prompts: tuple[str, ...]
    heldout: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Tuned:
    """A subject with the adapter that knows it."""

    subject: Subject
    adapter: Path


def subjects(request: Request) -> list[Subject]:
    """The subjects to train on, ``request.count`` at most.

    Raises:
        UserError: there are none, or a folder cannot be used.
    """
    if request.images:
        problems, found = [], []
        for text in request.images:
            folder = Path(text).expanduser()
            if not folder.is_dir() or not find_pictures(folder):
                problems.append(f'--images "{text}" is no folder with pictures.')
                continue
            caption = request.caption.replace("{}", folder.resolve().name.replace("_", " "))
            found.append(Subject(folder.resolve().name, folder, caption, _prompts(request, caption, PROMPTS)))
        names = [subject.name for subject in found]
        for name in sorted({name for name in names if names.count(name) > 1}):
            problems.append(f'--images: two folders are called "{name}"; rename one.')
        if problems:
            raise UserError(problems)
        return found[: request.count]
    if request.model not in builtin.MODELS:
        raise UserError(
            "Give adapters of this model (--loras runs/*/adapter), or folders of pictures to train on (--images cat/)."
        )
    return [builtin_subject(name, request) for name in builtin.subjects("development")[: request.count]]


def builtin_subject(name: str, request: Request) -> Subject:
    """A subject that comes with the package."""
    folder = builtin.subject_path(name)
    about = json.loads((folder / "subject.json").read_text(encoding="utf-8"))
    caption = about["instance_prompt"]
    heldout = tuple(sorted((folder / "heldout").glob("*.webp")))
    return Subject(
        folder.name, folder / "train", caption, _prompts(request, caption, about["preview_prompts"]), heldout
    )


def given(request: Request) -> list[Tuned]:
    """The adapters in ``request.loras``, with what their runs say of them.

    Raises:
        UserError: a file is missing, or nothing is known of its subject and no prompts are given.
    """
    problems, found = [], []
    for text in request.loras:
        path = Path(text).expanduser()
        try:
            adapter = FrozenAdapters([str(path)], key="--loras").files[0]
        except UserError as error:
            problems += error.problems
            continue
        run_folder = adapter.parent.parent if adapter.parent.name == "adapter" else adapter.parent
        settings = _settings_of(run_folder)
        data, problem = _table(settings, "data"), _other_base(text, _table(settings, "model"), request)
        if problem:
            problems.append(problem)
            continue
        caption, images = data.get("prompt") or "", _images_of(run_folder)
        if not caption and not (request.prompts and all("{}" not in prompt for prompt in request.prompts)):
            problems.append(f'--loras "{text}" does not say what it was trained on; give --prompts without {{}}.')
            continue
        name = f"{len(found):02d}-{run_folder.resolve().name}"  # two runs may be called the same
        usable = images if images is not None and images.is_dir() and find_pictures(images) else None
        found.append(Tuned(Subject(name, usable, caption, _prompts(request, caption, PROMPTS)), adapter))
    if problems:
        raise UserError(problems)
    return found


def _other_base(text: str, base: dict[str, Any], request: Request) -> str | None:
    """What in the base that a run was trained on is not in the model whose blocks are looked into."""
    if base.get("base_adapters"):
        return f'--loras "{text}" was trained over model.base_adapters, which a selection does not load; leave it out.'
    theirs, ours = base.get("transformer"), request.transformer
    if theirs and (ours is None or Path(theirs).expanduser().absolute() != Path(ours).expanduser().absolute()):
        return f'--loras "{text}" was trained on the transformer of "{theirs}"; give it as --model.transformer.'
    return None


def trained(model: Model, subjects: Sequence[Subject]) -> list[Tuned]:
    """Plain LoRA of every subject through the ordinary run; what is there already is not trained again.

    Raises:
        UserError: the settings or the pictures cannot be used.
        RunError: a run cannot go on.
    """
    prepared = [prepare_plain(model, subject, model.request.folder / "loras" / subject.name) for subject in subjects]
    found = []
    for number, (subject, one) in enumerate(zip(subjects, prepared, strict=True), start=1):
        adapter = one.output / "adapter" / FILE_NAME
        say(f"== LoRA {number} of {len(prepared)}: {subject.name}")
        run(one)
        found.append(Tuned(subject, adapter))
    return found


def training_of(request: Request) -> dict[str, Any]:
    """Settings of the trainings by dotted key: those of the request, over ours for a built-in model."""
    return {**(BUILTIN_TRAINING if request.model in builtin.MODELS else {}), **request.training}


def prepare_plain(model: Model, subject: Subject, folder: Path, **settings: Any) -> Prepared:
    """The run that trains LoRA on a subject without skipping and patches, at the size that is drawn.

    Args:
        settings: what differs from that, by dotted key.
    """
    assert subject.images is not None
    request, side = model.request, min(model.size)
    values = {
        "skip.front": 0, "skip.tail": 0, "patches.direction": "fixed", "data.resolution": side,
        "data.full_resolution": side, **training_of(request),
        "model.path": request.model, "model.revision": request.revision, "model.transformer": request.transformer,
        "model.dtype": request.dtype,
        "train.device": request.device, "data.images": str(subject.images), "data.prompt": subject.caption,
        "output": str(folder), **settings,
    }  # fmt: skip
    return prepare(from_flat(values))


def _prompts(request: Request, caption: str, default: Sequence[str]) -> tuple[str, ...]:
    return tuple(prompt.replace("{}", caption) for prompt in request.prompts or default)


def _images_of(folder: Path) -> Path | None:
    """The folder of a run's pictures; None: its settings do not say where it is.

    A relative one, which earlier versions wrote, counts from where the run was started: from where its ``output``, if
    relative too, is its folder. It never counts from the current directory, where another folder may have that name.
    """
    settings = _settings_of(folder)
    text, output = _table(settings, "data").get("images"), settings.get("output")
    if not isinstance(text, str) or not text:
        return None
    images = Path(text).expanduser()
    if images.is_absolute():
        return images
    if not isinstance(output, str) or not output:
        return None
    parts, place = Path(output).expanduser().parts, folder.absolute()
    if Path(output).is_absolute() or ".." in parts or place.parts[-len(parts) :] != parts:
        return None
    return place.parents[len(parts) - 1] / images


def _settings_of(folder: Path) -> dict[str, Any]:
    try:
        return tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError):
        return {}


def _table(settings: dict[str, Any], name: str) -> dict[str, Any]:
    found = settings.get(name)
    return found if isinstance(found, dict) else {}
