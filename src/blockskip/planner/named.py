"""The model a plan is for: a folder, a hub id, a bare config.json, or a published model whose sizes are built in."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from blockskip.errors import UserError
from blockskip.families import family_of
from blockskip.loading.single_file import open_single_file
from blockskip.loading.source import ModelSource, open_model
from blockskip.loading.transformer import empty_transformer
from blockskip.units import size as in_units

FOLDER = Path(__file__).parent / "models"
#: Of a transformer's config: what its text encoders and its autoencoder must give.
INPUTS = (
    "in_channels", "joint_attention_dim", "pooled_projection_dim", "caption_channels", "cap_feat_dim", "text_embed_dim",
    "text_emb_dim",
)  # fmt: skip


def named_models() -> list[str]:
    """Hub ids of the models whose configs are built in."""
    return sorted(path.name.replace("--", "/") for path in FOLDER.iterdir() if path.is_dir())


def open_for_plan(
    path: str, revision: str | None = None, transformer: str | None = None
) -> tuple[ModelSource, tuple[str, ...]]:
    """The configs of a model, and what has to be said about them. No weights are read, fetched or converted.

    Args:
        path: what ``model.path`` takes, or a transformer's ``config.json``.
        transformer: what ``model.transformer`` takes.

    Raises:
        UserError: there is no such model, or its class is not supported, or the transformer is not of it.
    """
    source, remarks = _opened(path, revision)
    if transformer is None:
        return source, remarks
    single = open_single_file(transformer, source)
    if not single.as_it_is:
        remarks = (*remarks, f"The first run converts {single.path.name}: {in_units(single.size)} of disk, kept.")
    return replace(source, single=single), remarks


def _opened(path: str, revision: str | None) -> tuple[ModelSource, tuple[str, ...]]:
    file = Path(path).expanduser()
    if file.is_file() and file.suffix == ".json":
        return _bare(file)
    try:
        return open_model(path, revision), ()
    except UserError as error:
        if path not in named_models():
            known = f"Built in are {', '.join(named_models())}."
            raise UserError([*error.problems, known] if "/" in path and not file.exists() else error.problems) from None
        folder = FOLDER / path.replace("/", "--")
        return replace(open_model(str(folder)), name=path), (f"The configs of {path} are those built in.",)


def _bare(file: Path) -> tuple[ModelSource, tuple[str, ...]]:
    """A pipeline around a transformer's config: the other parts are those of the family's first published model."""
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        family_of(str(config["_class_name"]))
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f'"{file}" is not the config.json of a diffusers transformer.') from None
    except UserError as error:
        raise UserError(f'"{file}": {error}') from None
    name = _nearest(file, config)
    folder = Path(tempfile.mkdtemp(prefix="blockskip-plan-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shutil.copytree(FOLDER / name.replace("/", "--"), folder, dirs_exist_ok=True)
    shutil.copyfile(file, folder / "transformer" / "config.json")
    remark = f"Text encoders and autoencoder are assumed to be those of {name}."
    source = replace(open_model(str(folder)), name=str(file))
    try:
        empty_transformer(source)
    except Exception as error:  # whatever the class has to say of its arguments
        raise UserError(f'"{file}": no {config["_class_name"]} can be made from it ({error}).') from None
    return source, (remark,)


def _nearest(file: Path, config: dict[str, Any]) -> str:
    """The published model whose transformer's config is most like this one, and takes what it takes."""
    alike: dict[str, int] = {}
    for name in named_models():
        about = FOLDER / name.replace("/", "--") / "transformer" / "config.json"
        own = json.loads(about.read_text(encoding="utf-8"))
        if all(config.get(key, own.get(key)) == own.get(key) for key in ("_class_name", *INPUTS)):
            alike[name] = sum(own.get(key) == value for key, value in config.items())
    if not alike:
        raise UserError(
            f'"{file}": the text encoders and autoencoder of no built-in model go with it; give a whole pipeline.'
        )
    return max(alike, key=lambda name: alike[name])
