"""Transformers of fake tensors, put together as the phases put theirs together: stubs, LoRA, quantised and visiting
blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.overrides import TorchFunctionMode

from blockskip.adapters.lora import add_lora
from blockskip.loading.ahead import reads_ahead
from blockskip.loading.quantized import empty_quantized, linear_layers
from blockskip.method.skipping import SkippedModel, install_stubs
from blockskip.method.streaming import install_streamed
from blockskip.planner.autocast import run_like
from blockskip.planner.counting import LiveBytes, tables
from blockskip.planner.parts import empty_part, fake, module_bytes
from blockskip.planner.setting import Setting
from blockskip.training.lisa import LisaBlocks


class Different(TorchFunctionMode):
    """Inside, no two tensors are equal: fake ones have no values to compare."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function, unless it compares."""
        return False if func is torch.equal else func(*args, **(kwargs or {}))


class FakeBlocks:
    """A transformer of stubs, its blocks without memory, and their tensors as often as they are asked for."""

    def __init__(self, setting: Setting, live: LiveBytes) -> None:
        self.layout = setting.source.family.layout
        self.model = empty_part(setting.source, "transformer", setting.dtype)
        self.empty = install_stubs(self.model, self.layout, range(setting.num_blocks))
        #: Values of the largest tensor of a block, which is read at a time.
        self.largest_tensor = max(value.numel() for block in self.empty.values() for value in block.parameters())
        #: Of the block that is read while another one computes.
        self.bytes_ahead = max(map(module_bytes, self.empty.values())) if _two(setting) else 0
        self._live = live

    def fill(self) -> None:
        """Give the embedders and the head their tensors; called where tensors are fake and counted."""
        fake(self.model)
        self._live.tag_module(self.model)

    def read(self, index: int) -> dict[str, torch.Tensor]:
        """The tensors of a block, as new ones."""
        with self._live.role("weights"):
            return {
                name: torch.empty(value.shape, dtype=value.dtype)
                for name, value in self.empty[index].state_dict().items()
            }

    @contextmanager
    def block(self, index: int) -> Iterator[nn.Module]:
        """The block with its tensors in its place; a stub again, and no tensors, afterwards."""
        block, own = self.empty[index], dict(self.empty[index].named_parameters())
        block.load_state_dict(self.read(index), assign=True)
        block.requires_grad_(False).eval()
        stub = self.layout.replace(self.model, index, block)
        try:
            yield block
        finally:
            self.layout.replace(self.model, index, stub)
            for name, parameter in own.items():
                owner, _, leaf = name.rpartition(".")
                block.get_submodule(owner)._parameters[leaf] = parameter

    def kind(self, index: int) -> tuple[Any, ...]:
        """Equal for blocks that take the same memory and work: their list, class and shapes."""
        shapes = tuple((name, tuple(value.shape)) for name, value in self.empty[index].named_parameters())
        return self.layout.names(self.model)[index].partition(".")[0], type(self.empty[index]), shapes


class FakeTraining:
    """The model that trains: stubs, LoRA, quantised and visiting blocks as the run has them.

    Args:
        live: counts what ``fill`` and the visiting blocks make.
        step: the optimiser step, on which with LISA it depends which blocks are trained.
    """

    def __init__(self, setting: Setting, live: LiveBytes, step: int = 0) -> None:
        config, layout = setting.config, setting.source.family.layout
        self._live = live
        #: Ids of the parameters that a backward pass gave a gradient.
        self.reached: set[int] = set()
        model = empty_part(setting.source, "transformer", setting.dtype)
        blocks = layout.blocks(model)
        self.skipped = SkippedModel(model, layout, setting.stored, setting.rule)
        run = (blocks[index] for index in {*setting.resident, *setting.streamed})
        #: Values of the largest tensor of the blocks that are run.
        self.largest_tensor = max(value.numel() for block in run for value in block.parameters())
        if config.model.quantization != "none":
            for index in setting.resident:
                for name, layer in linear_layers(blocks[index]).items():
                    packed = empty_quantized(layer, config.model.quantization, setting.dtype)
                    blocks[index].set_submodule(name, packed.requires_grad_(False))
        streamed = {index: blocks[index] for index in setting.streamed}
        self._visiting = {index: _shapes(block) for index, block in streamed.items()}
        sizes = [_count(block) for block in streamed.values()]
        #: Values of the blocks that are read for each run of them: of all of them, and of the largest.
        self.streamed_values, self.largest_streamed = sum(sizes), max(sizes, default=0)
        for index in {*setting.resident, *streamed}:
            run_like(blocks[index], setting.device)
        ahead = bool(streamed) and _two(setting)
        #: Of the block that is read while another one computes.
        self.bytes_ahead = max(map(module_bytes, streamed.values())) if ahead else 0
        install_streamed(model, layout, streamed, self._read)
        lora = config.lora
        assert lora.lora_alpha is not None
        train, self._lisa, self._step = config.train, None, step
        if train.lisa_blocks:
            self._lisa = LisaBlocks(model, layout, train.lisa_blocks, train.lisa_period, train.seed)
        else:
            add_lora(model, setting.targets, lora.rank, lora.lora_alpha, lora.dropout, 0, lora.freeze_a)
        self._away = {
            id(value) for block in streamed.values() for name, value in block.named_parameters() if "lora_" not in name
        }
        if setting.reference:
            for module in model.modules():
                if isinstance(module, LoraLayer):
                    module.cast_input_dtype_enabled = True
        if config.train.gradient_checkpointing:
            setting.source.family.enable_checkpointing(model)
        self.model = model

    def _read(self, index: int) -> dict[str, torch.Tensor]:
        with self._live.role("weights"):
            return {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in self._visiting[index].items()}

    def fill(self) -> list[nn.Parameter]:
        """Give everything that stays its tensors; returns the trained parameters in their order, float32."""
        fake(self.model, leave=self._away)
        adapter = [value for name, value in sorted(self.model.named_parameters()) if "lora_" in name]
        if self._lisa is not None:
            self._lisa.begin(self._step)
            adapter = self._lisa.parameters
        parameters = [value for value in adapter if value.requires_grad]
        #: Bytes of the LoRA parameters, trained or not; with LISA of the masters of the blocks that are trained.
        self.adapter_bytes = sum(value.nbytes for value in adapter)
        self._live.tag([value for value in self.model.parameters() if id(value) not in self._away], "weights")
        self._live.tag([*self.model.buffers(), *tables(self.model)], "weights")
        self._live.tag(adapter, "adapters")
        self._live.watch_gradients(parameters)
        reached = self.reached  # a hook that held this object would keep it for ever, since a hook is not seen by gc
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(lambda value: reached.add(id(value)))
        live = self._live
        for parameter, master in self._lisa.pairs.values() if self._lisa is not None else ():
            if master is not parameter:
                parameter.register_post_accumulate_grad_hook(_of_master(master, live, reached))
        return parameters

    def kept(self) -> int:
        """How many values of the base stay in memory as the file has them: without those that are packed."""
        named = [(name, value) for name, value in self.model.named_parameters() if id(value) not in self._away]
        return sum(value.numel() for name, value in named if "lora_" not in name and value.is_floating_point())


@contextmanager
def visiting_layers(model: nn.Module, names: list[str], live: LiveBytes) -> Iterator[list[int]]:
    """Layers that have tensors only while they run; entered where tensors are fake and counted.

    What is given is filled with the bytes of activations that wait ahead of each layer.

    Args:
        model: without memory; everything outside the layers becomes fake.
        names: full names of the layers.
    """
    layers = [model.get_submodule(name) for name in names]
    away = {id(value) for layer in layers for value in layer.parameters()}
    fake(model, leave=away)
    live.tag([value for value in model.parameters() if id(value) not in away], "weights")
    live.tag(model.buffers(), "weights")
    held: dict[int, Mapping[str, nn.Parameter]] = {}
    waiting: list[int] = []

    def arrive(layer: nn.Module, *_: Any) -> None:
        waiting.append(live.now["activations"])
        held[id(layer)] = dict(layer.named_parameters())
        with live.role("weights"):
            fake(layer)

    def leave(layer: nn.Module, *_: Any) -> None:
        for name, parameter in held.pop(id(layer)).items():
            owner, _, leaf = name.rpartition(".")
            layer.get_submodule(owner)._parameters[leaf] = parameter

    handles = [layer.register_forward_pre_hook(arrive) for layer in layers]
    handles += [layer.register_forward_hook(leave) for layer in layers]
    try:
        yield waiting
    finally:
        for handle in handles:
            handle.remove()


def _of_master(master: nn.Parameter, live: LiveBytes, reached: set[int]) -> Callable[[torch.Tensor], None]:
    """A hook on a parameter, after the one that gives its gradient to its master."""

    def given(_: torch.Tensor) -> None:
        live.tag([master.grad], "gradients")
        reached.add(id(master))

    return given


def _two(setting: Setting) -> bool:
    """Whether a second block is in the device's memory."""
    return setting.config.model.read_ahead and reads_ahead(setting.device)


def _shapes(block: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (value.shape, value.dtype) for name, value in block.state_dict().items()}


def _count(module: nn.Module) -> int:
    return sum(value.numel() for value in module.parameters())
