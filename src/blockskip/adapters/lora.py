"""LoRA on the middle blocks through PEFT: full layer names, float32 weights, our own seed."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

import torch
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from torch import nn

from blockskip.errors import UserError
from blockskip.method.layout import BlockLayout

ADAPTER = "default"


def target_names(
    model: nn.Module, layout: BlockLayout, middle: Sequence[int], targets: Sequence[str], *, each: bool = True
) -> list[str]:
    """Full names of the linear layers of the middle blocks that take LoRA, in the model's order.

    Args:
        model: the transformer, also an empty one on the meta device; the middle blocks must stand in it.
        targets: names inside a block; ``to_q`` matches ``attn.to_q``, ``attn.to_q`` matches itself.
        each: every target must match, as when a user named them; else one match in all is enough.

    Raises:
        UserError: a target matches no linear layer of the middle blocks; the sentence lists names that are near.
    """
    names, blocks = layout.names(model), layout.blocks(model)
    found: list[str] = []
    matched: set[str] = set()
    linear: dict[str, None] = {}
    for index in middle:
        for name, module in blocks[index].named_modules():
            if not isinstance(module, nn.Linear):
                continue
            linear[name] = None
            hits = [target for target in targets if name == target or name.endswith("." + target)]
            if hits:
                matched.update(hits)
                found.append(f"{names[index]}.{name}")
    problems = []
    for target in targets:
        if target not in matched and (each or not found):
            near = difflib.get_close_matches(target, linear, 3, 0.4) or list(linear)[:3]
            problems.append(
                f'lora.targets: "{target}" matches no linear layer of the {len(middle)} trained blocks; '
                f"there are for example {', '.join(near)}."
            )
    if problems:
        raise UserError(problems)
    return found


def add_lora(
    model: nn.Module,
    names: Sequence[str],
    rank: int,
    lora_alpha: float,
    dropout: float,
    seed: int,
    freeze_a: bool = False,
) -> list[nn.Parameter]:
    """Give every named layer a LoRA pair and return the trainable parameters, float32, in a fixed order.

    A is drawn from the seed alone; B is zero, so that the model's output is unchanged. PEFT's cast of layer inputs to
    float32 is off: under ``precision.compute`` the pairs run in the base's dtype.

    Args:
        freeze_a: train B alone (LoRA-FA, arXiv 2308.03303): the layers' inputs are not kept for A's gradient.
    """
    config = LoraConfig(
        r=rank, lora_alpha=lora_alpha, lora_dropout=dropout, target_modules=list(names), init_lora_weights=True
    )  # type: ignore[arg-type]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, ADAPTER)  # not all of diffusers' models have ``add_adapter``
    parameters = []
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.cast_input_dtype_enabled = False
    held = (value.device for value in model.parameters() if value.device.type != "meta")
    device = next(held, torch.device("meta"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, parameter in sorted(model.named_parameters()):
            if "lora_" not in name:
                continue
            if parameter.device.type == "meta":  # PEFT puts pairs beside their layers, and a streamed block's are empty
                parameter = _with_memory(model, name, device)
            if ".lora_A." in name:  # drawn again in a fixed order and on the CPU: the same on every device
                drawn = torch.empty(parameter.shape, dtype=torch.float32)
                nn.init.kaiming_uniform_(drawn, a=5**0.5)
                parameter.data = drawn.to(parameter.device)
            else:
                parameter.data = parameter.data.float()
            trained = not freeze_a or ".lora_B." in name
            parameter.requires_grad_(trained)
            if trained:
                parameters.append(parameter)
    return parameters


def _with_memory(model: nn.Module, name: str, device: torch.device) -> nn.Parameter:
    """A zero parameter in the place of an empty one, on the device of what the model holds in memory."""
    layer, _, own = name.rpartition(".")
    parameter = nn.Parameter(torch.zeros(model.get_parameter(name).shape, device=device))
    setattr(model.get_submodule(layer), own, parameter)
    return parameter


def adapter_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The adapter's tensors by PEFT's names (``transformer_blocks.3.attn.to_q.lora_A.weight``), float32, detached."""
    state: dict[str, torch.Tensor] = get_peft_model_state_dict(model, adapter_name=ADAPTER)
    return {name: value.detach() for name, value in sorted(state.items())}


def load_adapter_state(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Set the adapter's tensors in place.

    Raises:
        ValueError: the state lacks a tensor of the adapter or has one that it does not know.
    """
    if set(state) != set(adapter_state(model)):
        raise ValueError("the stored adapter has other layers than this run's adapter")
    result: Any = set_peft_model_state_dict(model, state, adapter_name=ADAPTER)
    if result is not None and getattr(result, "unexpected_keys", None):
        raise ValueError(f"the stored adapter has unknown tensors: {result.unexpected_keys[:3]}")
