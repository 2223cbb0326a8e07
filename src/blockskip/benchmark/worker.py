"""One part of the benchmark, in a process of its own, so that its memory is its own.

    python -m blockskip.benchmark.worker task.json

A part is the base model on other prompts, the base model on one subject, or one setting on one subject.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import sys
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from blockskip import __version__
from blockskip.benchmark import measures
from blockskip.benchmark.drawn import Drawer, Heldout, encoded, through_autoencoder
from blockskip.benchmark.instruments import Instruments, open_instruments
from blockskip.benchmark.model import Model, open_for
from blockskip.benchmark.request import Request
from blockskip.benchmark.settings import SETTINGS
from blockskip.benchmark.subjects import OTHER_PROMPTS, Subject
from blockskip.benchmark.trained import adapter_files, configured, train
from blockskip.data.pictures import find_pictures
from blockskip.data.pixels import open_picture
from blockskip.errors import RunError, UserError
from blockskip.precision import denormals_flushed
from blockskip.store.files import write_atomically

#: Prompts that a run is looked at with before its end: the first ones, one picture each.
EARLY_PROMPTS = 4
#: Packages whose versions stand in every line.
PACKAGES = ("torch", "diffusers", "transformers", "peft", "numpy", "pillow")


@denormals_flushed()
def work(task: dict[str, Any]) -> None:
    """Do a part and write its result into its folder.

    Args:
        task: ``{"kind", "key", "folder", "request", "subject", "setting", "seed", "others", "base"}``; the last two are
            the folders of the parts that this one needs.
    """
    request = Request.from_json(task["request"])
    model, folder = open_for(request), Path(task["folder"])
    if task["kind"] == "others":
        Drawer(model, OTHER_PROMPTS).pictures(folder / "pictures", OTHER_PROMPTS, 1, model.adapters(), "other prompts")
        found: dict[str, Any] = {}
    elif task["kind"] == "base":
        found = _base(model, Subject.from_json(task["subject"]), folder)
    else:
        found = _run(model, Subject.from_json(task["subject"]), folder, task)
    document = json.dumps({"key": task["key"], **found, **_surroundings()}, indent=1)
    write_atomically(folder / "result.json", lambda path: path.write_text(document, encoding="utf-8"))


def _surroundings() -> dict[str, Any]:
    """What a result may depend on in its last digits: versions, threads, and the kind of machine."""
    return {
        "versions": {"blockskip": __version__, "python": platform.python_version()}
        | {name: version(name) for name in PACKAGES},
        "threads": torch.get_num_threads(),
        "machine": f"{platform.system()} {platform.machine()}",
    }


def _references(heldout: Heldout, base: Path) -> dict[str, list[Any]]:
    real = [open_picture(Path(path)) for path in heldout.subject.heldout]
    return {"real": real, "drawable": heldout.drawable(base / "heldout")}


def _base(model: Model, subject: Subject, folder: Path) -> dict[str, Any]:
    instruments = open_instruments(model.request, model.device)
    drawer = Drawer(model, _texts(subject))
    rows = drawer.pictures(folder / "pictures", _texts(subject), model.request.images, model.adapters(), "the base")
    heldout = Heldout(model, subject)
    references = _references(heldout, folder)
    files = find_pictures(Path(subject.train))
    train_pictures = {
        "real": [open_picture(path) for path in files],
        "drawable": through_autoencoder(
            model, folder / "train", len(files), lambda: encoded(model, files, subject.caption, model.size)
        ),
    }
    return {
        "heldout": heldout.losses(model.adapters(), folder / "losses.json"),
        **_numbers(rows, subject, references, instruments),
        "ceiling": {
            "fidelity": measures.top(train_pictures, references, instruments),
            **measures.real_pictures(subject, references["real"], instruments),
        },
    }


def _run(model: Model, subject: Subject, folder: Path, task: dict[str, Any]) -> dict[str, Any]:
    setting, points = SETTINGS[task["setting"]], model.request.points
    facts = train(configured(model, setting, subject, task["seed"]), folder, points)
    final, earlier = adapter_files(folder)
    instruments = open_instruments(model.request, model.device)
    base, heldout = Path(task["base"]), Heldout(model, subject)
    references = _references(heldout, base)
    drawer = Drawer(model, (*_texts(subject), *OTHER_PROMPTS))
    drawn = folder / f"drawn-{task['drawing']}"
    curve = []
    for step, file in sorted(earlier.items()):
        adapters = model.adapters(file)
        name = f"step-{step:06d}"
        rows = drawer.pictures(drawn / name, _texts(subject)[:EARLY_PROMPTS], 1, adapters, f"step {step}")
        losses = heldout.losses(adapters, drawn / f"{name}.json")
        curve.append(
            {"step": step, "heldout": losses, "fidelity": measures.fidelity(rows, references, instruments)}
        )  # fmt: skip
    adapters = model.adapters(final)
    rows = drawer.pictures(drawn / "end", _texts(subject), model.request.images, adapters, "the prompts")
    others = drawer.pictures(drawn / "others", OTHER_PROMPTS, 1, adapters, "other prompts")
    before = drawer.pictures(Path(task["others"]) / "pictures", OTHER_PROMPTS, 1, model.adapters(), "the base")
    losses = heldout.losses(adapters, drawn / "losses.json")
    numbers = _numbers(rows, subject, references, instruments)
    early = [[row[0]] for row in rows[:EARLY_PROMPTS]]
    end = {"step": facts["config"]["train.steps"], "heldout": losses,
           "fidelity": measures.fidelity(early, references, instruments)}  # fmt: skip
    drift = measures.drift(others, before, instruments)
    return {"heldout": losses, **numbers, "drift": drift, "curve": [*curve, end], "run": facts}


def _numbers(rows: Any, subject: Subject, references: dict[str, Any], instruments: Instruments) -> dict[str, Any]:
    return {
        "fidelity": measures.fidelity(rows, references, instruments),
        "prompt": measures.prompt_fidelity(rows, subject.prompts, instruments),
        "background": measures.backgrounds(rows, subject.prompts, instruments),
    }


def _texts(subject: Subject) -> list[str]:
    return [prompt.text for prompt in subject.prompts]


def end_with_parent(look_every: float = 1.0) -> None:
    """End this process soon after the one that started it has ended, however that ended; files are whole at any time.

    Args:
        look_every: seconds between two looks.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(look_every)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(arguments: list[str] | None = None) -> int:
    """Do the part that a file describes; returns the exit code."""
    (path,) = sys.argv[1:] if arguments is None else arguments
    gc.collect()
    gc.freeze()  # what the imports made is looked at no more: releasing memory takes milliseconds
    try:
        work(json.loads(Path(path).read_text(encoding="utf-8")))
    except (UserError, RunError) as error:
        print(f"blockskip: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    end_with_parent()
    sys.exit(main())
