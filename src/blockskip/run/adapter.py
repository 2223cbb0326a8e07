"""The run's adapter file: what was learnt, and in its header where it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from blockskip import __version__, builtin
from blockskip.adapters.files import DIFFUSERS_KEY, lora_header, save_lora
from blockskip.errors import RunError
from blockskip.run.prepare import Prepared
from blockskip.store.files import write_atomically


def save_adapter(folder: Path, prepared: Prepared, base: str, state: Mapping[str, torch.Tensor]) -> Path:
    """Write the LoRA file into a folder and return its path.

    Args:
        base: the hash of the base's weights.
        state: the adapter's tensors by PEFT name.

    Raises:
        RunError: nothing was learnt, or a tensor is not finite; no file is written.
    """
    if not any(bool(value.any()) for name, value in state.items() if ".lora_B." in name):
        raise RunError("Training changed nothing: every lora_B is still zero. Is train.learning_rate too small?")
    try:
        return save_lora(folder, state, header(prepared, base), write_atomically)
    except ValueError as error:
        raise RunError(f"The adapter cannot be saved: {error}. Try a lower train.learning_rate.") from None


def header(prepared: Prepared, base: str) -> dict[str, str]:
    """Texts for the file's header: no paths of this machine, no names, no dates (the same run gives the same bytes)."""
    config, source = prepared.config, prepared.source
    assert config.lora.lora_alpha is not None
    name = config.model.path if source.hub or config.model.path in builtin.MODELS else source.folder.name
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
        "blockskip.skipped": f"{prepared.split.front}+{prepared.split.tail} of {prepared.num_blocks}",
        "blockskip.rule": config.skip.rule.rpartition(":")[2],
        "blockskip.tail_mode": config.skip.tail_mode,
        "blockskip.base_sha256": base,
        "blockskip.quantization": config.model.quantization,
    }
    return {key: str(value) for key, value in entries.items()}
