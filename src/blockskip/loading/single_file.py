"""A transformer's weights in a file of their own, held against the pipeline that they are to be used in."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers
import torch
from accelerate import init_empty_weights
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from diffusers.loaders.single_file_utils import infer_diffusers_model_type
from safetensors import SafetensorError, safe_open

from blockskip.errors import UserError
from blockskip.keys import DIFFERENCE, KIND
from blockskip.loading.converted import converted_folder, linked_folder
from blockskip.loading.unread import Unread, is_zipped, unread_tensors

if TYPE_CHECKING:
    from blockskip.loading.source import ModelSource

KEY = "model.transformer"
#: Below which a whole checkpoint, or a program that saved the transformer alone, puts the transformer's names.
PREFIXES = ("model.diffusion_model.", "diffusion_model.", "transformer.", "model.")
#: What other files are, by the beginnings of the names in them.
OTHERS = {
    "a text encoder": r"encoder\.block\.|text_model\.|model\.embed_tokens\.|model\.layers\.|transformer\.resblocks\.",
    "an autoencoder": r"(encoder|decoder)\.|first_stage_model\.",
    "a ControlNet": r"controlnet_|control_model\.",
}
#: What is in the names of adapters of every kind.
LORA = ("lora", "lokr_", "hada_", "oft_")
#: What to do with an adapter.
AS_LORA = "it as model.base_adapters, or as --lora to `blockskip generate`"
AS_DIFFERENCE = "it as --lora to `blockskip generate`"
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: Of weights that were quantised: these kinds hold none.
OTHER_KINDS = (torch.int64, torch.bool)
#: The name of one of several files.
SHARD = re.compile(r"-\d+-of-\d+\.")


@dataclass(frozen=True, eq=False)
class SingleFile:
    """A file whose tensors were found to be those of a pipeline's transformer.

    Args:
        path: the file.
        class_name: the transformer's class.
        config: its ``config.json``, of the pipeline.
        tensors: by diffusers' names, in the order of the model.
        as_it_is: the file holds these tensors under these names and no others, so that it can be loaded itself.
    """

    path: Path
    class_name: str
    config: Path
    tensors: Mapping[str, Unread]
    as_it_is: bool

    @property
    def dtype(self) -> torch.dtype:
        """In which the weights are stored, told by one tensor."""
        return next(iter(self.tensors.values())).dtype

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(value.numel() * value.element_size() for value in self.tensors.values())

    def folder(self) -> Path:
        """A folder as diffusers' ``from_pretrained`` takes it: the file itself in it, or what it was converted to.

        The first call for a file of the original layout writes it to the package's cache.

        Raises:
            UserError: there is no room for it.
        """
        if self.as_it_is and (linked := linked_folder(self.path, self.config)) is not None:
            return linked
        return converted_folder(self.path, self.config, self.class_name, self.tensors)


def open_single_file(path: str, source: ModelSource) -> SingleFile:
    """The file with the transformer's weights, checked by its names, shapes and dtypes; no weights are read.

    Args:
        source: the pipeline that has everything else.

    Raises:
        UserError: it is no such file, or of another model than the pipeline.
    """
    file = Path(path).expanduser().absolute()
    start, class_name = f'{KEY} = "{path}"', source.family.transformer_class
    stored = _tensors(file, start)
    if SHARD.search(file.name):
        raise UserError(f"{start} is one of several files; give the folder of the pipeline they belong to as --model.")
    if holds_difference(file):
        raise UserError(f"{start} is a file of changed weights; give {AS_DIFFERENCE}.")
    if any(part in name for name in stored for part in LORA):
        raise UserError(f"{start} is a LoRA; give {AS_LORA}.")
    config = source.config("transformer")
    with init_empty_weights(include_buffers=False):
        wanted = getattr(diffusers, class_name).from_config(config).state_dict()
    prefix = next((text for text in PREFIXES if any(name.startswith(text) for name in stored)), "")
    own = {name.removeprefix(prefix): value for name, value in stored.items() if name.startswith(prefix)}
    if not _named_alike(own, wanted, len(wanted)):
        whole = "diffusion_model" in prefix  # else nothing but the transformer can be meant
        others = [name for name in (own if whole else stored) if name.removeprefix(prefix) not in wanted]
        for what, names in OTHERS.items():
            if any(re.match(names, name) for name in others):
                raise UserError(
                    f'{start} is {what}, which comes with "{source.name}"; give the file with the transformer.'
                )
    kinds = sorted({str(value.dtype).removeprefix("torch.") for value in own.values()
                    if value.dtype not in (*FLOATS, *OTHER_KINDS)})  # fmt: skip
    if kinds:
        raise UserError(
            f"{start} holds weights that were quantised ({', '.join(kinds)}); give the file in bf16, fp16 or fp32, and "
            'model.quantization = "int8" or "nf4" for less memory.'
        )
    try:
        found = _by_diffusers_names(class_name, own, wanted, config)
        _compare(found, wanted)
    except _Misfit as error:
        raise UserError(
            f'{start} does not fit "{source.name}", whose transformer is a {class_name}: {error}{_looks_like(stored)}; '
            "give a file of that model, the same one with diffusers' names, or as --model the pipeline of this one."
        ) from None
    as_it_is = stored.keys() == wanted.keys() and not is_zipped(file)
    tensors = {name: found[name] for name in wanted}
    return SingleFile(file, class_name, source.folder / "transformer" / "config.json", tensors, as_it_is)


class _Misfit(Exception):
    """In what a file differs from the model that it is to be."""


def _tensors(file: Path, start: str) -> dict[str, Unread]:
    if file.is_dir():
        raise UserError(f"{start} is a folder; give a file, or as --model the folder of a whole pipeline.")
    try:
        with file.open("rb") as stream:
            begin = stream.read(4)
    except OSError as error:
        raise UserError(
            f"{start} cannot be read ({error.strerror}); give a file with a transformer's weights."
        ) from None
    if begin == b"GGUF":
        raise UserError(
            f"{start} is a GGUF file, whose weights are quantised; give the .safetensors file it was made from, and "
            'model.quantization = "int8" or "nf4" for less memory.'
        )
    try:
        found = unread_tensors(file)
    except Exception as error:  # of safetensors, zip files and pickles
        reason = " ".join(str(error).split())[:100]
        advice = "fetch it again" if file.suffix == ".safetensors" else "fetch it again, or give a .safetensors file"
        raise UserError(f"{start} cannot be read ({reason}); {advice}.") from None
    if not found:
        raise UserError(f"{start} holds no tensors; give a file with a transformer's weights.")
    return found


def _named_alike(own: Collection[str], wanted: Collection[str], names: int) -> bool:
    """Whether more than half of a number of names are diffusers': so they are in some original layouts too."""
    return 2 * len(set(own) & set(wanted)) > names


def _by_diffusers_names(
    class_name: str, own: Mapping[str, Unread], wanted: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The tensors as they are or converted, whichever has more of the names that are wanted.

    Raises:
        _Misfit: of ``_converted``, where few of the file's own names are diffusers'.
    """
    if not wanted.keys() - own.keys():
        return own
    try:
        found = _converted(class_name, own, config)
    except _Misfit:
        if _named_alike(own, wanted, min(len(own), len(wanted))):  # it may be of fewer blocks
            return own
        raise
    return max(found, own, key=lambda tensors: len(tensors.keys() & wanted.keys()))


def _converted(class_name: str, own: Mapping[str, Unread], config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tensors of an original checkpoint by diffusers' names.

    Raises:
        _Misfit: it is none of this class, as far as its names tell, or diffusers has no converter for the class.
    """
    if class_name not in SINGLE_FILE_LOADABLE_CLASSES:
        raise _Misfit("its tensors have other names than in diffusers, which cannot convert that class")
    rest = dict(own)
    try:
        found: dict[str, Any] = SINGLE_FILE_LOADABLE_CLASSES[class_name]["checkpoint_mapping_fn"](
            checkpoint=rest, config=config
        )
    except KeyError as error:
        raise _Misfit(f'diffusers finds no "{error.args[0]}" in it') from None
    except Exception:
        raise _Misfit("diffusers cannot convert it") from None
    left = [name for name in rest if rest is not found and re.search(r"\.\d+\.", name)]
    if left:
        raise _Misfit(f"diffusers has no place for {_few(left)}")
    return found


def _compare(found: Mapping[str, Any], wanted: Mapping[str, torch.Tensor]) -> None:
    for name, value in wanted.items():
        if found.get(name) is not None and found[name].shape != value.shape:
            here, there = (" x ".join(map(str, tensor.shape)) for tensor in (found[name], value))
            raise _Misfit(f"it is of another size, {name} being {here} where the pipeline's config wants {there}")
    lacks = [name for name in wanted if found.get(name) is None]
    more = [name for name, value in found.items() if value is not None and name not in wanted]
    for what, names in (("it lacks", lacks), ("that transformer has no", more)):
        if names:
            raise _Misfit(f"{what} {_few(names)}")


def _few(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def holds_difference(file: Path) -> bool:
    """Whether a file holds changed weights (``adapters.difference``); False where it cannot be read."""
    try:
        with safe_open(file, framework="pt") as stored:
            return (stored.metadata() or {}).get(KIND) == DIFFERENCE
    except (SafetensorError, OSError):
        return False


def _looks_like(stored: Mapping[str, Unread]) -> str:
    """What diffusers takes a checkpoint for, as part of a sentence; empty where it knows none such."""
    try:
        name = infer_diffusers_model_type(stored)
    except Exception:
        return ""
    return "" if name == "v1" else f" (it looks like {name})"  # v1 is what it takes everything else for
