"""The pictures of a run with their captions, checked before anything else is done."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from blockskip.data.pixels import open_picture
from blockskip.data.sizes import scaled_size
from blockskip.errors import UserError
from blockskip.keys import file_sha256

#: File names that are pictures; what of these can be opened depends on the packages that are installed.
EXTENSIONS = frozenset(
    {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".heic", ".heif", ".avif"},
)


@dataclass(frozen=True)
class Picture:
    """One picture of the data.

    Args:
        path: the file.
        sha256: of the file's bytes.
        size: (width, height) in pixels, upright.
        scaled: (width, height) it is scaled to before patches are cut (``scaled_size``).
        caption: its text; empty means the empty caption.
        is_class: a picture of the class (prior preservation), not of the subject.
    """

    path: Path
    sha256: str
    size: tuple[int, int]
    scaled: tuple[int, int]
    caption: str
    is_class: bool = False


def find_pictures(folder: Path) -> list[Path]:
    """The picture files of a folder that can be opened here, sorted by name; subfolders are not searched.

    The extension decides, in small or capital letters. Hidden files (macOS's ``._name`` too) are left out.
    ``.heic`` and ``.heif`` need pillow-heif, ``.avif`` a Pillow that has it.
    """
    return _sort_out(folder)[0]


def read_pictures(
    folder: Path | str,
    prompt: str | None,
    *,
    resolution: int,
    full_resolution: int,
    key: str = "data.images",
    prompt_key: str = "data.prompt",
    is_class: bool = False,
) -> list[Picture]:
    """The pictures of a folder with their captions; every file is decoded once.

    A picture's caption is the text file of the same stem (``aaa.bbb.jpg``: ``aaa.bbb.txt``), UTF-8 with or without a
    byte order mark, without the white space around it; an empty file is the empty caption, and is warned about. A
    picture without a file gets the prompt. Two pictures that share a caption file are warned about.

    Args:
        folder: the folder of pictures.
        prompt: caption of pictures without a file of their own; None: every picture needs a file.
        resolution, full_resolution: in pixels, for ``Picture.scaled``.
        key, prompt_key: the settings that folder and prompt come from, named in errors.
        is_class: what the pictures are marked with.

    Raises:
        UserError: every problem of the folder, its pictures and its captions, at once.
    """
    _check_folder(folder, key)
    folder = Path(folder).expanduser()
    paths, unreadable = _sort_out(folder)
    problems = [_needs_package(path) for path in unreadable]
    if not paths and not unreadable:
        problems.append(_nothing_found(folder, key))
    captions = _read_captions(folder, paths, prompt, prompt_key, problems)
    pictures = []
    for path in paths:
        try:
            size, digest = open_picture(path).size, file_sha256(path)
        except Exception as error:  # Pillow's plugins raise nearly anything for a damaged file
            problems.append(_why_not(path, error))
            continue
        scaled = scaled_size(size, resolution, full_resolution)
        pictures.append(Picture(path, digest, size, scaled, captions.get(path, ""), is_class))
    if problems:
        raise UserError(problems)
    return pictures


def name_some(names: Sequence[str]) -> str:
    """The first five names and how many more there are, for a sentence."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(f'"{name}"' for name in names[:5]) + more


def _sort_out(folder: Path) -> tuple[list[Path], list[Path]]:
    """The pictures of a folder that can be opened here, and those that cannot."""
    with contextlib.suppress(ImportError):
        import pillow_heif

        pillow_heif.register_heif_opener()
    known = Image.registered_extensions()
    files = (path for path in folder.iterdir() if not path.name.startswith(".") and not path.is_dir())
    found = sorted((path for path in files if path.suffix.lower() in EXTENSIONS), key=lambda path: path.name)
    readable = [path for path in found if path.suffix.lower() in known]
    return readable, [path for path in found if path.suffix.lower() not in known]


def _check_folder(folder: Path | str, key: str) -> None:
    if not str(folder):
        raise UserError(f"{key} is not set; give the folder that holds the pictures.")
    path = Path(folder).expanduser()
    try:
        if not path.exists():
            raise UserError(f'{key} = "{folder}" does not exist; give the folder that holds the pictures.')
        if not path.is_dir():
            raise UserError(f'{key} = "{folder}" is a file; give the folder that holds it.')
        next(path.iterdir(), None)
    except OSError as error:
        raise UserError(f'{key} = "{folder}" cannot be read: {error.strerror}; give a folder that can.') from None


def _read_captions(
    folder: Path, paths: Sequence[Path], prompt: str | None, prompt_key: str, problems: list[str]
) -> dict[Path, str]:
    """Each picture's caption as far as there is one; what is wrong is added to the problems."""
    texts = sorted(path for path in folder.iterdir() if path.suffix.lower() == ".txt" and not path.is_dir())
    files = {path.stem: path for path in texts}  # "a.txt" sorts after "a.TXT" and so wins
    by_file: dict[Path, list[Path]] = {}
    bare, captions = [], {}
    for path in paths:
        if path.stem in files:
            by_file.setdefault(files[path.stem], []).append(path)
        elif prompt is None:
            bare.append(path)
        else:
            captions[path] = prompt.strip()
    for file, sharing in by_file.items():
        try:
            text = file.read_bytes().decode("utf-8-sig").strip()
        except OSError as error:
            problems.append(f'The caption "{file}" cannot be read: {error.strerror}; repair or remove it.')
            continue
        except UnicodeDecodeError:
            text = "\0"
        if "\0" in text:
            problems.append(f'The caption "{file}" is not UTF-8 text; save it again as UTF-8.')
            continue
        if not text:
            warnings.warn(f'The caption "{file}" is empty: its picture is trained without words.', stacklevel=3)
        if len(sharing) > 1:
            names = name_some([path.name for path in sharing])
            warnings.warn(f'The caption "{file}" is used for several pictures: {names}.', stacklevel=3)
        captions |= dict.fromkeys(sharing, text)
    if bare:
        names = name_some([path.name for path in bare])
        problems.append(
            f'No caption for {names} in "{folder}"; set {prompt_key}, or write a text file beside each picture '
            f'(for the first: "{bare[0].stem}.txt").'
        )
    return captions


def _nothing_found(folder: Path, key: str) -> str:
    if not any(folder.iterdir()):
        return f'{key} = "{folder}" is an empty folder; put the pictures into it.'
    names = " ".join(sorted(EXTENSIONS))
    return f'{key} = "{folder}" holds no pictures ({names}; subfolders are not searched); give the folder that does.'


def _needs_package(path: Path) -> str:
    heif = path.suffix.lower() in (".heic", ".heif")
    hint = ' install pillow-heif (pip install "dit-blockskip[heif]") or' if heif else ""
    return f'The picture "{path}" is of a kind that cannot be opened here;{hint} convert it to JPEG or PNG.'


def _why_not(path: Path, error: Exception) -> str:
    if isinstance(error, Image.DecompressionBombError):
        return f'The picture "{path}" is too large to be opened safely ({error}); make it smaller.'
    if isinstance(error, UnidentifiedImageError):
        return f'The picture "{path}" is not a picture that can be read; replace or remove it.'
    if isinstance(error, OSError) and error.strerror:
        return f'The picture "{path}" cannot be opened: {error.strerror}; repair or remove it.'
    return f'The picture "{path}" is damaged or incomplete ({error}); replace or remove it.'
