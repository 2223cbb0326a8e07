"""The subjects: those that come with the package, or folders of one's own in DreamBooth's layout."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blockskip import builtin
from blockskip.benchmark.request import Request
from blockskip.data.kept import copy_pictures, split_pictures
from blockskip.data.pictures import find_pictures
from blockskip.errors import UserError
from blockskip.keys import file_sha256

#: The rare word that stands for a subject in captions and prompts; what prompts are scored by does not have it.
IDENTIFIER = "sks"
#: Prompts of subjects that bring none; ``{}`` stands for the identifier and the class.
PROMPTS = (
    "a photo of {} in the snow", "a photo of {} on the beach", "a photo of {} in the forest",
    "a photo of {} on a wooden table", "a photo of {} in front of a brick wall", "a photo of {} under the night sky",
    "a small {} in a meadow", "a large {} at sunset",
)  # fmt: skip
#: Prompts of other things, for the drift: what a model drew before should stay what it was.
OTHER_PROMPTS = (
    "a photo of a dog on the beach", "a photo of a car in the snow", "a photo of an apple on a wooden table",
    "a photo of a cat in the forest", "a photo of a train in the desert", "a photo of a guitar on pink paper",
    "a photo of a lion at sunset", "a photo of a tulip in a meadow",
)  # fmt: skip


@dataclass(frozen=True)
class Prompt:
    """A prompt that subjects are drawn with.

    Args:
        text: as the model gets it.
        said: the same in ordinary words, without the identifier: what the picture is compared with.
        background: the phrase of one of the known backgrounds in it, or None.
    """

    text: str
    said: str
    background: str | None = None


@dataclass(frozen=True)
class Subject:
    """Something to personalise for, everything as plain values.

    Args:
        name: of its folder.
        train: folder of its training pictures.
        heldout: files of real pictures of it that no run sees.
        heldout_said: what each of them shows, in ordinary words; None where nobody says so.
        heldout_backgrounds: the phrase of the background of each, or None.
        caption: of each training picture.
        prompts: what it is drawn with.
    """

    name: str
    train: str
    heldout: tuple[str, ...]
    heldout_said: tuple[str | None, ...]
    heldout_backgrounds: tuple[str | None, ...]
    caption: str
    prompts: tuple[Prompt, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain values; ``from_json`` is the inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Subject:
        """Of ``as_json``."""
        values = {name: tuple(v) if isinstance(v, list) else v for name, v in document.items()}
        return cls(**{**values, "prompts": tuple(Prompt(**prompt) for prompt in document["prompts"])})

    def identity(self) -> dict[str, Any]:
        """What results on it depend on: the bytes of its pictures and the words, without paths."""
        pictures = {
            "train": [file_sha256(path) for path in find_pictures(Path(self.train))],
            "heldout": [file_sha256(Path(path)) for path in self.heldout],
        }
        left = {name: value for name, value in self.as_json().items() if name not in ("train", "heldout")}
        return {**left, **pictures, "captions": _caption_files(Path(self.train))}


def subjects(request: Request) -> list[Subject]:
    """The subjects that are asked for.

    Raises:
        UserError: there is none, one is not known, or a folder cannot be used.
    """
    if request.subjects_from is not None:
        return _own(request)
    known = builtin.subjects(request.which)  # type: ignore[arg-type]
    problems = [
        f'--subjects "{name}" is not of the {request.which} set; there are {", ".join(known)}.'
        for name in request.subjects
        if name not in known
    ]
    if problems:
        raise UserError(problems)
    return [builtin_subject(name) for name in (request.subjects or known)[: request.count]]


def builtin_subject(name: str) -> Subject:
    """A subject that comes with the package, with its evaluation prompts."""
    folder = builtin.subject_path(name)
    about = json.loads((folder / "subject.json").read_text(encoding="utf-8"))
    phrases = sorted(set(known_backgrounds()), key=len, reverse=True)
    texts = [text for kind in about["evaluation"]["prompts"].values() for text in kind]
    prompts = [
        Prompt(text, in_words(text, about["class_word"], about["name"]), next((p for p in phrases if p in text), None))
        for text in texts
    ]
    heldout = sorted((folder / "heldout").glob("*.webp"))
    backgrounds = [about["backgrounds"][f"heldout/{path.name}"] for path in heldout]
    caption = about["instance_prompt"]
    return Subject(
        folder.name, str(folder / "train"), tuple(map(str, heldout)),
        tuple(in_words(f"{caption} {phrase}", about["class_word"], about["name"]) for phrase in backgrounds),
        tuple(backgrounds), caption, tuple(prompts),
    )  # fmt: skip


def known_backgrounds() -> tuple[str, ...]:
    """The phrases of the backgrounds that the built-in models know."""
    settings = json.loads((builtin.model_path() / "builtin.json").read_text(encoding="utf-8"))
    return tuple(settings["backgrounds"])


def in_words(prompt: str, class_word: str, name: str) -> str:
    """A prompt with the subject's name in place of the identifier and the class.

    >>> in_words("a photo of sks animal in the snow", "animal", "owl")
    'a photo of an owl in the snow'
    >>> in_words("a photo of a small sks thing on the sea", "thing", "camera")
    'a photo of a small camera on the sea'
    """
    article = "an" if name[0] in "aeiou" else "a"
    prompt = re.sub(rf"\b(an? \w+) {IDENTIFIER} {class_word}\b", rf"\1 {name}", prompt)
    return re.sub(rf"\b{IDENTIFIER} {class_word}\b", f"{article} {name}", prompt)


def class_of(folder: str) -> str:
    """What a folder's name says of its subject: letters only, ``dog6`` is a dog, ``red_cartoon`` a red cartoon."""
    return " ".join(re.sub(r"[\d_\-.]+", " ", folder).split()) or folder


def _own(request: Request) -> list[Subject]:
    root = Path(str(request.subjects_from)).expanduser()
    if not root.is_dir():
        raise UserError(f'--subjects-from "{root}" is no folder; give one with a folder of pictures for each subject.')
    folders = [path for path in sorted(root.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    if request.subjects:
        names = [path.name for path in folders]
        problems = [
            f'--subjects "{name}" has no folder in "{root}"; there are {", ".join(names) or "none"}.'
            for name in request.subjects
            if name not in names
        ]
        if problems:
            raise UserError(problems)
        folders = [root / name for name in request.subjects]
    if not folders:
        raise UserError(
            f'--subjects-from "{root}" holds no folder; give one with a folder of pictures for each subject.'
        )
    problems, found = [], []
    for folder in folders[: request.count]:
        try:
            found.append(_own_subject(request, folder))
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(problems)
    return found


def _own_subject(request: Request, folder: Path) -> Subject:
    if (folder / "train").is_dir() and (folder / "heldout").is_dir():
        train, kept = find_pictures(folder / "train"), find_pictures(folder / "heldout")
    else:
        train, kept = split_pictures(find_pictures(folder))
    if len(train) < 2 or not kept:
        raise UserError(
            f'"{folder}" has too few pictures to learn from and to measure with; put at least 3 into it, or 2 into its '
            "folder train and 1 into heldout."
        )
    name = class_of(folder.name)
    instance = f"{IDENTIFIER} {name}"
    prompts = [
        Prompt(text.replace("{}", instance), text.replace("{}", name))
        for text in _prompt_lines(folder) or _prompt_lines(folder.parent) or PROMPTS
    ]
    nothing: tuple[None, ...] = (None,) * len(kept)
    return Subject(
        folder.name, str(_training_folder(request, folder, train)), tuple(map(str, kept)), nothing, nothing,
        request.caption.replace("{}", name), tuple(prompts),
    )  # fmt: skip


def _training_folder(request: Request, folder: Path, pictures: Sequence[Path]) -> Path:
    """A folder that holds the training pictures alone."""
    if pictures[0].parent != folder:
        return pictures[0].parent
    return copy_pictures(pictures, request.folder / "subjects" / folder.name)


def _prompt_lines(folder: Path) -> list[str]:
    """The lines of ``prompts.txt``, without empty ones and comments (#).

    Raises:
        UserError: a line does not name the subject.
    """
    path = folder / "prompts.txt"
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f'"{path}" cannot be read as UTF-8 text ({error}).') from None
    found = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if lacking := [line for line in found if "{}" not in line]:
        raise UserError(f'"{path}": every prompt needs a {{}} where the subject stands; "{lacking[0]}" has none.')
    return found


def _caption_files(folder: Path) -> dict[str, str]:
    return {path.name: file_sha256(path) for path in sorted(folder.glob("*.txt"))}
