"""Where a model's files are: the built-in pipeline, a diffusers folder, or a hub id."""

from __future__ import annotations

import functools
import importlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from blockskip import builtin
from blockskip.errors import UserError
from blockskip.families import Family, family_of
from blockskip.loading.single_file import AS_DIFFERENCE, AS_LORA, SingleFile, holds_difference, open_single_file

#: Second copies of weights in 16 bits, which are not read.
VARIANTS = ["*.fp16.*", "*.bf16.*"]
SETTINGS = ("*.json", "*.txt", "*.model", "*.jinja")


@dataclass(frozen=True)
class ModelSource:
    """A diffusers pipeline on disk (or on the hub, fetched part by part) and its family.

    Args:
        name: what the user wrote.
        folder: the pipeline's folder.
        family: its architecture.
        settings: of ``builtin.json``, if the folder has one: the call that suits the model (``call``).
        hub: (repository, revision) when parts are still to be fetched.
        single: the file that the transformer's weights come from, if not from the folder.
    """

    name: str
    folder: Path
    family: Family
    settings: dict[str, Any] = field(default_factory=dict)
    hub: tuple[str, str | None] | None = None
    single: SingleFile | None = None

    def config(self, part: str) -> dict[str, Any]:
        """The config of a part, ``transformer`` or ``vae`` for example.

        Raises:
            UserError: the part has no readable config.
        """
        path = self.folder / part / "config.json"
        try:
            config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f'model.path = "{self.name}": "{path}" cannot be read ({error}).') from None
        return config

    def part_folder(self, part: str) -> Path:
        """The folder of a part with its weights, fetched from the hub or converted when they are not there yet."""
        if part == "transformer" and self.single is not None:
            return self.single.folder()
        if self.hub is not None:
            _fetch(*self.hub, tuple(f"{part}/{pattern}" for pattern in (*SETTINGS, "*.safetensors")))
        return self.folder / part

    def import_classes(self) -> None:
        """Import everything that ``load`` will need, so that no phase is charged with it."""
        index = json.loads((self.folder / "model_index.json").read_text(encoding="utf-8"))
        for entry in index.values():
            if isinstance(entry, list) and len(entry) == 2 and all(isinstance(name, str) for name in entry):
                getattr(importlib.import_module(entry[0]), entry[1])

    def part_class(self, part: str) -> Any:
        """The class that ``load`` makes a part of, as ``model_index.json`` names it, but for unused heads."""
        library, class_name = json.loads((self.folder / "model_index.json").read_text(encoding="utf-8"))[part]
        if class_name.endswith("Processor"):  # of text and pictures, which needs more packages: here it gets text only
            class_name = "AutoTokenizer"
        cls = getattr(importlib.import_module(library), class_name)
        generates = isinstance(cls, type) and issubclass(cls, PreTrainedModel) and cls.can_generate()
        return _without_head(cls) if generates else cls

    def load(self, part: str, dtype: torch.dtype | None = None) -> Any:
        """A tokenizer, scheduler or model of the pipeline, by the class that ``model_index.json`` names."""
        cls, folder = self.part_class(part), self.part_folder(part)
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            return cls.from_pretrained(folder)
        if cls.__module__.partition(".")[0] == "transformers":
            transformers_logging.disable_progress_bar()
            model = cls.from_pretrained(folder, dtype=dtype)
        else:
            model = cls.from_pretrained(folder, torch_dtype=dtype)
        return model.requires_grad_(False).eval()

    @property
    def text_parts(self) -> tuple[tuple[str, str], ...]:
        """The family's (tokenizer, text encoder) pairs, without the optional ones that this pipeline does not have."""
        index = json.loads((self.folder / "model_index.json").read_text(encoding="utf-8"))
        lacked = {name for name in self.family.optional_encoders if not any(index.get(name) or ())}
        return tuple(pair for pair in self.family.text_parts if pair[1] not in lacked)

    @property
    def pixel_stride(self) -> int:
        """Pixels per side of a token."""
        return self.family.pixel_stride(self.config("vae"), self.config("transformer"))

    @property
    def largest_side(self) -> int | None:
        """Pixels per side of the largest picture that the model can draw; None: of any size."""
        return self.family.largest_side(self.config("vae"), self.config("transformer"))

    @property
    def full_resolution(self) -> int:
        """Pixels that the model was made for."""
        made_for = int(self.settings.get("full_resolution", self.family.defaults.full_resolution))
        return min(made_for, self.largest_side or made_for)

    @property
    def text_length(self) -> int:
        """Text tokens that the model was made for."""
        return int(self.settings.get("call", {}).get("max_sequence_length", self.family.defaults.text_length))


@functools.cache
def _without_head(cls: Any) -> Any:
    """A class of language models without their head over the vocabulary, which no conditioning tensor comes from.

    It is never filled from the file: a gigabyte of Llama 3.1. One that is the embeddings themselves stays.
    """

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, *args, **kwargs)
        if isinstance(getattr(self, "lm_head", None), nn.Linear) and not self.all_tied_weights_keys:
            self.lm_head = nn.Identity()

    ignored = [*(cls._keys_to_ignore_on_load_unexpected or ()), r"^lm_head\."]
    changes = {"__init__": init, "__module__": cls.__module__, "_keys_to_ignore_on_load_unexpected": ignored}
    return type(cls.__name__, (cls,), changes)


def open_model(path: str, revision: str | None = None, transformer: str | None = None) -> ModelSource:
    """The source of a built-in model (``builtin``, ``builtin-sana``), a folder or a hub id; reads settings only.

    Args:
        transformer: a file to take the transformer's weights from, instead of the pipeline's own.

    Raises:
        UserError: there is no such model, it is not a pipeline, it needs a login, or its class is not supported.
    """
    hub = None
    if path in builtin.MODELS:
        folder = builtin.model_path(path)
    elif Path(path).expanduser().is_dir():
        folder = Path(path).expanduser()
    elif Path(path).suffix in (".safetensors", ".gguf", ".ckpt", ".pt", ".bin") or Path(path).is_file():
        single = (
            "a single file: give the folder or hub id of its pipeline as --model, which has the text encoders and the "
            "autoencoder, and the file as --model.transformer"
        )
        raise UserError(f'model.path = "{path}" is {_adapter_in(Path(path).expanduser()) or single}.')
    elif path.count("/") == 1 and not path.startswith((".", "~", "/")):
        hub = (path, revision)
        patterns = ("model_index.json", *(f"*/{pattern}" for pattern in SETTINGS))
        folder = _fetch(path, revision, patterns)
    else:
        raise UserError(
            f'model.path = "{path}" is neither {", ".join(builtin.MODELS)}, a folder, nor a hub id like "owner/name".'
        )
    index = folder / "model_index.json"
    if not index.is_file():
        raise UserError(f'model.path = "{path}" {_no_pipeline(folder)}.')
    try:
        pipeline = json.loads(index.read_text(encoding="utf-8"))
        class_name = pipeline["_class_name"]
    except (ValueError, KeyError, TypeError):
        raise UserError(f'model.path = "{path}": its model_index.json is damaged; fetch the model again.') from None
    try:
        family = family_of(class_name)
    except UserError as error:
        raise UserError(f'model.path = "{path}": {error}') from None
    settings = folder / "builtin.json"
    try:
        call = {"call": family.pipeline_call(pipeline)}
        found = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else call
    except ValueError:
        raise UserError(f'model.path = "{path}": its builtin.json is damaged; fetch the model again.') from None
    source = ModelSource(path, folder, family, found, hub)
    parts = ["transformer", "vae", *(encoder for _, encoder in source.text_parts)]
    missing = [part for part in parts if not any(pipeline.get(part) or ())]
    if hub is None:
        missing = [part for part in parts if part in missing or not (folder / part / "config.json").is_file()]
    if missing:
        raise UserError(f'model.path = "{path}" lacks {_lacked(family, missing)}.')
    return source if transformer is None else replace(source, single=open_single_file(transformer, source))


def _lacked(family: Family, missing: Sequence[str]) -> str:
    """Parts that a pipeline lacks, and what to give instead: the end of a sentence."""
    given = [f"{part} from {family.elsewhere[part]}" for part in missing if part in family.elsewhere]
    advice = "give a complete diffusers pipeline"
    return f"{', '.join(missing)}; {advice}" + (f", with {', '.join(given)} (README, Limits)" if given else "")


def _no_pipeline(folder: Path) -> str:
    """What a folder without ``model_index.json`` is, and what to give instead: the end of a sentence."""
    if (folder.parent / "model_index.json").is_file():
        return f'is one part of a pipeline; give the folder of the whole, "{folder.parent}"'
    adapters = map(_adapter_in, (*folder.glob("*.safetensors"), *folder.glob("adapter/*.safetensors")))
    if found := next(filter(None, adapters), ""):
        return f"holds {found}"
    return 'is not a diffusers pipeline: "model_index.json" is missing in it; give the folder or hub id of a whole one'


def _adapter_in(file: Path) -> str:
    """What adapter a file holds, and what to give instead: the end of a sentence; empty: none, or it cannot be read."""
    base = "give its base as the model"
    if holds_difference(file):
        return f"a file of changed weights; {base}, and {AS_DIFFERENCE}"
    try:
        with safe_open(file, framework="pt") as stored:
            lora = any("lora_" in name for name in stored.keys())  # noqa: SIM118
    except (SafetensorError, OSError):
        return ""
    return f"a LoRA; {base}, and {AS_LORA}" if lora else ""


@functools.cache
def _fetch(repository: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    """The snapshot's folder once the files that match are in it; asked of the hub once a process."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    start = f'model.path = "{repository}"'
    try:
        return Path(
            snapshot_download(repository, revision=revision, allow_patterns=list(patterns), ignore_patterns=VARIANTS)
        )
    except GatedRepoError:
        raise UserError(
            f"{start} asks for a licence: accept it on the model's page of the hub, then log in with `hf auth login`."
        ) from None
    except RevisionNotFoundError:
        raise UserError(
            f'{start} has no revision "{revision}"; take a branch, tag or commit of its page, or leave it out.'
        ) from None
    except RepositoryNotFoundError:
        raise UserError(
            f"{start} is no folder here and no model on the hub (or a private one: `hf auth login`)."
        ) from None
    except Exception as error:  # timeouts and proxies raise classes of the client's own libraries
        reason, advice = (
            type(error.__cause__ or error).__name__,
            "look at the network and try again, or give a folder with the model",
        )
        if os.environ.get("HF_HUB_OFFLINE"):
            advice = "HF_HUB_OFFLINE is set: unset it, or give a folder with the model"
        raise UserError(f"{start} is no folder here and cannot be fetched from the hub ({reason}); {advice}.") from None
