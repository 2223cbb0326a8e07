"""Writes a whole pipeline of random bfloat16 weights at the published sizes of a model, to see it run on a machine.

    python -m tools.make_random_checkpoint --model sana-0.6b --out build/sana-0.6b
    python -m tools.make_random_checkpoint --model flux --out build/flux --max-shard-size 5GB

A model is named as its presets are (``sana-1.6b`` is ``sana``) or by its hub id (``blockskip families``); a folder with
a pipeline's configs is one too. Transformer and autoencoder have the published sizes and files: shards and their index
where one file would be larger than ``--max-shard-size``. Tensors are written piece by piece, so that a few dozen MiB of
memory are enough for any model. Text encoders have the published width and few layers, for the words of a
built-in model's tokenizer, unless ``--text-encoders published`` asks for their sizes too.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler
from huggingface_hub import split_torch_state_dict_into_shards
from tokenizers import pre_tokenizers
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase, Qwen2Tokenizer

from blockskip import builtin
from blockskip.errors import UserError
from blockskip.loading.source import ModelSource
from blockskip.planner.named import open_for_plan
from blockskip.planner.parts import empty_part
from blockskip.presets.cards import presets_by_model
from blockskip.progress import progress
from blockskip.units import size as in_units

DTYPE = torch.bfloat16
DEVIATION = 0.02
#: Values that are drawn; a model's are these again and again, in the order of its tensors.
DRAWN = 2**22 + 1
SHARD = "10GB"
Encoders = Literal["small", "published"]

#: Further names of models, beside those of the presets.
ALIASES = {"sana-1.6b": "sana", "flux-dev": "flux"}
#: Tokenizers of the built-in models by the beginning of a text encoder's class: model, and part.
_TOKENIZERS = {
    "CLIP": ("builtin", "tokenizer"), "T5": ("builtin", "tokenizer_2"), "UMT5": ("builtin", "tokenizer_2"),
    "Gemma": ("builtin-sana", "tokenizer"),
}  # fmt: skip
_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_DTYPES = {
    torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.int64: "I64", torch.bool: "BOOL",
}  # fmt: skip


def path_of(name: str) -> str:
    """The hub id or folder that a model's name stands for; what is no name is taken as one of these."""
    models = {presets[0].partition("/")[0]: model for model, presets in presets_by_model().items()}
    return models.get(ALIASES.get(name, name), name)


def checkpoint_bytes(name: str, text_encoders: Encoders = "small") -> int:
    """Bytes of the transformer and the autoencoder of a model, on disk, and of published text encoders."""
    source = open_for_plan(path_of(name))[0]
    encoders = [part for _, part in source.text_parts] if text_encoders == "published" else []
    parts = (empty_part(source, part, DTYPE) for part in ("transformer", "vae", *encoders))
    return sum(value.nbytes for part in parts for value in part.state_dict().values())


def write_checkpoint(
    name: str, folder: Path, max_shard_size: int | str = SHARD, text_encoders: Encoders = "small"
) -> Path:
    """Write a pipeline of random weights, the same ones each time, to a folder, and return the folder.

    Args:
        name: of a model, as the command takes it.
        max_shard_size: bytes of a weights file at most, or a text such as ``"5GB"``; one tensor may be larger.
        text_encoders: of the published width with few layers, or of the published sizes.

    Raises:
        UserError: there is no such model, the size is none, the folder is not empty, or the disk is too small.
    """
    try:
        split_torch_state_dict_into_shards({}, filename_pattern="{suffix}", max_shard_size=max_shard_size)
    except ValueError:
        raise UserError(f'max_shard_size "{max_shard_size}" is not a size; give "5GB", for example.') from None
    source = open_for_plan(path_of(name))[0]
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f'"{folder}" is not empty; give a new folder.')
    folder.mkdir(parents=True, exist_ok=True)
    needed, free = checkpoint_bytes(name, text_encoders), shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(f'{name} takes {in_units(needed)} and the disk of "{folder}" has {in_units(free)} left.')
    index: dict[str, Any] = json.loads((source.folder / "model_index.json").read_text(encoding="utf-8"))
    for tokenizer_part, part in source.text_parts:
        tokenizer = _tokenizer(index[part][1])
        tokenizer.save_pretrained(folder / tokenizer_part)
        index[tokenizer_part] = ["transformers", type(tokenizer).__name__]
        _write_text_encoder(source, part, tokenizer, folder / part, max_shard_size, text_encoders)
    scheduler = _scheduler(source)
    scheduler.save_pretrained(folder / "scheduler")
    index["scheduler"] = ["diffusers", type(scheduler).__name__]
    for part in ("transformer", "vae"):
        model = empty_part(source, part, DTYPE)
        model.save_config(folder / part)
        write_weights(model, folder / part, "diffusion_pytorch_model", max_shard_size)
    text = json.dumps({key: value for key, value in index.items() if key[0] != "_" or key == "_class_name"}, indent=1)
    (folder / "model_index.json").write_text(text + "\n", encoding="utf-8")  # last: without it this is no pipeline
    return folder


def write_weights(model: nn.Module, folder: Path, name: str, max_shard_size: int | str = SHARD, seed: int = 0) -> None:
    """Random values for a model without memory, as safetensors files with the names that ``save_pretrained`` gives.

    One-dimensional weights, those of norms, are ones; buffers with memory keep their values.

    Args:
        model: its parameters may be on the meta device; it stays as it is.
        name: of a file, without its suffix.
    """
    state = _untied(model)
    split = split_torch_state_dict_into_shards(
        {key: torch.empty_like(value, device="meta") for key, value in state.items()},
        filename_pattern=name + "{suffix}.safetensors", max_shard_size=max_shard_size,
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    if split.is_sharded:
        document = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / f"{name}.safetensors.index.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    values = _Values(seed)
    with progress(sum(value.numel() for value in state.values()), f"write {folder.name}") as bar:
        for file, names in split.filename_to_tensors.items():
            with open(folder / file, "wb") as stream:
                stream.write(_header({key: state[key] for key in names}))
                for key in names:
                    for piece in values.of(key, state[key]):
                        stream.write(piece.view(torch.uint8).numpy().data)
                        bar.advance(piece.numel())


def _header(tensors: dict[str, torch.Tensor]) -> bytes:
    """What precedes the tensors in a safetensors file: the length of a JSON document, and the document."""
    document: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, value in tensors.items():
        offsets = [start, start + value.nbytes]
        document[name] = {"dtype": _DTYPES[value.dtype], "shape": list(value.shape), "data_offsets": offsets}
        start += value.nbytes
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class _Values:
    """Random values for one tensor after the other."""

    def __init__(self, seed: int) -> None:
        self._drawn = torch.randn(DRAWN, generator=torch.Generator().manual_seed(seed)).mul_(DEVIATION).to(DTYPE)
        self._place = 0

    def of(self, name: str, value: torch.Tensor) -> Iterator[torch.Tensor]:
        """The values of a tensor in their order, a piece of one dimension at a time."""
        if not value.is_meta:
            yield value.detach().contiguous().reshape(-1)
        elif value.dim() == 1 and name.endswith("weight"):
            yield torch.ones(value.shape, dtype=value.dtype)
        else:
            left = value.numel()
            while left:
                piece = self._drawn[self._place : self._place + left]
                yield piece.to(value.dtype)
                left, self._place = left - len(piece), (self._place + len(piece)) % DRAWN


def _untied(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state of a model; of names that share a parameter only the first."""
    state, seen = model.state_dict(keep_vars=True), set[int]()
    kept = {name: value for name, value in state.items() if not (id(value) in seen or seen.add(id(value)))}
    return {name: value.detach() for name, value in kept.items()}


def _tokenizer(encoder: str) -> PreTrainedTokenizerBase:
    """A tokenizer for a text encoder of a class: a built-in model's, or one of bytes with a chat format."""
    for start, (model, part) in _TOKENIZERS.items():
        if encoder.startswith(start):
            found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(builtin.model_path(model) / part)
            return found
    words = {token: number for number, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Qwen2Tokenizer(vocab=words, merges=[])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = _CHAT
    return tokenizer


def _write_text_encoder(
    source: ModelSource, part: str, tokenizer: PreTrainedTokenizerBase, folder: Path, shard: int | str, size: Encoders
) -> None:
    if size == "published":
        encoder = empty_part(source, part, DTYPE)
        config = encoder.config
    else:
        config = AutoConfig.from_pretrained(source.folder / part)
        text = config.get_text_config()
        width, layers = text.hidden_size, max(2, _last_read(source, part) + 1)
        inside = width if layers == 2 else text.head_dim  # where many layers are read, they are narrow
        text.num_hidden_layers = layers
        setattr(text, "d_ff" if hasattr(text, "d_ff") else "intermediate_size", inside)
        if inside < width:
            text.num_attention_heads = text.num_key_value_heads = 1
        if getattr(text, "layer_types", None):
            text.layer_types = [text.layer_types[number % len(text.layer_types)] for number in range(layers)]
        text.vocab_size = len(tokenizer)
        for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(text, token, getattr(tokenizer, token))
        vision = getattr(config, "vision_config", None)
        if vision is not None:
            setattr(vision, "depth" if hasattr(vision, "depth") else "num_hidden_layers", 1)
        encoder = _empty_encoder(source.part_class(part), config)
    config.dtype = DTYPE
    config.save_pretrained(folder)
    write_weights(encoder, folder, "model", shard)


def _empty_encoder(encoder_class: Any, config: Any) -> nn.Module:
    with torch.device("meta"):
        model: Any = encoder_class(config)
    model.tie_weights()
    return model.to(DTYPE)  # type: ignore[no-any-return]


def _last_read(source: ModelSource, part: str) -> int:
    """The number of the last layer of a text encoder that its family reads, where that is not the last there is."""
    if source.part_class(part).__name__.startswith("Llama"):
        return max(source.config("transformer").get("llama_layers") or (0,))
    return max(getattr(source.family, "text_states", (0,)))


def _scheduler(source: ModelSource) -> Any:
    """A scheduler of the kind that the pipeline has."""
    for model in builtin.MODELS:
        own = open_for_plan(model)[0]
        if own.family is source.family:
            return own.load("scheduler")
    flow = not source.family.pipeline_class.startswith("PixArt")
    return FlowMatchEulerDiscreteScheduler() if flow else DPMSolverMultistepScheduler()


def main(arguments: Sequence[str] | None = None) -> int:
    """Write a checkpoint; returns the exit status, 2 where it could not be."""
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(prog="python -m tools.make_random_checkpoint", description=lines[0])
    parser.add_argument("--model", required=True, help="sana-0.6b, sana-1.6b, flux, ..., a hub id, or a folder")
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument("--max-shard-size", default=SHARD, help=f"of a weights file (default: {SHARD})")
    parser.add_argument(
        "--text-encoders", choices=("small", "published"), default="small", help="their sizes (default: small)"
    )
    options = parser.parse_args(arguments)
    try:
        folder = write_checkpoint(options.model, options.out, options.max_shard_size, options.text_encoders)
    except UserError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return error.exit_code
    size = math.fsum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {in_units(int(size))}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
