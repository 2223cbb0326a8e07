"""The models and pictures that come with the package: where they lie."""

from pathlib import Path

_HERE = Path(__file__).resolve().parent


def model_path() -> Path:
    """The folder of the built-in FLUX pipeline, which `FluxPipeline.from_pretrained` reads."""
    return _HERE / "flux"


def subjects() -> list[str]:
    """The names of the held-out subjects, sorted."""
    return sorted(path.parent.name for path in (_HERE / "subjects").glob("*/subject.json"))


def subject_path(name: str) -> Path:
    """The folder of a held-out subject (`train/`, `heldout/`, `subject.json`). Raises KeyError for an unknown name."""
    if name not in subjects():
        raise KeyError(f"No built-in subject is called {name!r}; there are {', '.join(subjects())}.")
    return _HERE / "subjects" / name
