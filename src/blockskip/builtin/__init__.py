"""The models and pictures that come with the package: where they lie."""

import json
from pathlib import Path
from typing import Literal

_HERE = Path(__file__).resolve().parent
_SETS = ("development", "test")

#: What a user writes for a built-in model, and its folder.
MODELS = {"builtin": "flux", "builtin-sana": "sana"}


def model_path(name: str = "builtin") -> Path:
    """The folder of a built-in pipeline, which diffusers' `FluxPipeline` or `SanaPipeline` reads.

    Raises:
        KeyError: there is no built-in model of that name.
    """
    return _HERE / MODELS[name]


def prompt_map_path() -> Path:
    """The file of the maps from picture features to sentences and backgrounds (`blockskip.evaluation.prompt_map`)."""
    return _HERE / "prompt_map.safetensors"


def subjects(which: Literal["development", "test"] = "development") -> list[str]:
    """The names of the unseen subjects of one set, in their order; 12 each.

    The built-in models have seen no picture and no name of them. Those of the set "test" are looked at for published
    tables only, and so have to be asked for by its name.

    Raises:
        ValueError: there is no set of that name.
    """
    if which not in _SETS:
        raise ValueError(f"There is no set of subjects called {which!r}; there are {' and '.join(_SETS)}.")
    index = json.loads((_HERE / "subjects" / "subjects.json").read_text(encoding="utf-8"))
    return list(index[which])


def subject_path(name: str) -> Path:
    """The folder of an unseen subject of either set.

    `train/` and `heldout/` hold 5 pictures each (WebP, RGB, 256 x 256 px); `subject.json` says what is on them, and has
    the prompts.

    Raises:
        KeyError: there is no subject of that name.
    """
    if not any(name in subjects(which) for which in _SETS):
        raise KeyError(f"No built-in subject is called {name!r}; for development there are {', '.join(subjects())}.")
    return _HERE / "subjects" / name.replace(" ", "_")
