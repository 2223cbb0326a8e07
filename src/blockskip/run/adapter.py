"""The run's adapter file, LoRA or changed weights: what was learnt, and in its header where it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from blockskip import __version__, builtin
from blockskip.adapters.difference import save_difference
from blockskip.adapters.files import DIFFERENCE_NAME, DIFFUSERS_KEY, FILE_NAME, lora_header, save_lora
from blockskip.config import Config
from blockskip.errors import RunError
from blockskip.keys import DIFFERENCE
from blockskip.loading.weights import Weights
from blockskip.method.split import Split
from blockskip.run.prepare import Prepared
from blockskip.store.files import write_atomically

#: Entries of the header that speak of LoRA.
OF_LORA = (DIFFUSERS_KEY, "ss_network_dim", "ss_network_alpha", "blockskip.freeze_a")


def adapter_name(config: Config) -> str:
    """The name of a run's adapter file: LoRA, or with LISA changed weights."""
    return DIFFERENCE_NAME if config.train.lisa_blocks else FILE_NAME


def adapter_kind(adapter: Path) -> str:
    """What a run's adapter file holds, in words."""
    return "Changed weights" if adapter.name == DIFFERENCE_NAME else "LoRA"


def save_adapter(folder: Path, prepared: Prepared, base: str, state: Mapping[str, torch.Tensor]) -> Path:
    """Write the adapter's file into a folder and return its path.

    Args:
        base: the hash of the base's weights.
        state: the adapter's tensors by PEFT name; with LISA the trained weights by their full names.

    Raises:
        RunError: nothing was learnt, or a tensor is not finite; no file is written.
    """
    lisa = bool(prepared.config.train.lisa_blocks)
    learnt = _difference(prepared, state) if lisa else state
    if not any(bool(value.any()) for name, value in learnt.items() if lisa or ".lora_B." in name):
        what = "every weight is as it was" if lisa else "every lora_B is still zero"
        raise RunError(f"Training changed nothing: {what}. Is train.learning_rate too small?")
    try:
        save = save_difference if lisa else save_lora
        return save(folder, learnt, header(prepared, base), write_atomically)
    except ValueError as error:
        raise RunError(f"The adapter cannot be saved: {error}. Try a lower train.learning_rate.") from None


def _difference(prepared: Prepared, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Trained weights minus those of the base in the dtype of training, float32."""
    stored = Weights(prepared.source.part_folder("transformer"))
    return {
        name: value.cpu().float() - stored.read([name])[name].to(prepared.dtype).float()
        for name, value in state.items()
    }


def header(prepared: Prepared, base: str) -> dict[str, str]:
    """Texts for the file's header: no paths of this machine, no names, no dates (the same run gives the same bytes)."""
    config, source = prepared.config, prepared.source
    assert config.lora.lora_alpha is not None
    name = config.model.path if source.hub or config.model.path in builtin.MODELS else source.folder.name
    name = name if source.single is None else source.single.path.stem
    entries = {
        DIFFUSERS_KEY: lora_header(prepared.targets, config.lora.rank, config.lora.lora_alpha),
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.architecture": f"{source.family.name}/lora",
        "modelspec.title": config.data.prompt or name,
        "modelspec.trigger_phrase": config.data.prompt or "",
        "ss_base_model_version": name,
        "ss_network_dim": config.lora.rank,
        "ss_network_alpha": config.lora.lora_alpha,
        "ss_learning_rate": config.train.learning_rate,
        "ss_steps": config.train.steps,
        "ss_seed": config.train.seed,
        "ss_resolution": config.data.resolution,
        "ss_num_train_images": len(prepared.schedule.pictures),
        "blockskip.version": __version__,
        "blockskip.skipped": f"{_skipped(prepared.split)} of {prepared.num_blocks}",
        "blockskip.rule": config.skip.rule.rpartition(":")[2],
        "blockskip.front_mode": config.skip.front_mode,
        "blockskip.tail_mode": config.skip.tail_mode,
        "blockskip.base_sha256": base,
        "blockskip.freeze_a": config.lora.freeze_a,
        "blockskip.quantization": config.model.quantization,
    }
    if config.train.lisa_blocks:
        entries = {key: value for key, value in entries.items() if key not in OF_LORA}
        entries |= {
            "modelspec.architecture": f"{source.family.name}/{DIFFERENCE}",
            "blockskip.lisa": f"{config.train.lisa_blocks} blocks for {config.train.lisa_period} steps",
        }
    return {key: str(value) for key, value in entries.items()}


def _skipped(split: Split) -> str:
    """``3+4``: blocks at the front and the tail; ``3..6``: the first and the last number of a run inside."""
    start, stop = split.inner
    return f"{start}..{stop - 1}" if stop else f"{split.front}+{split.tail}"
