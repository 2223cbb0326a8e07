"""Seconds, estimated: one real block of each kind is timed on this machine, and the counted work does the rest.

The blocks have random weights at their true size and run on random inputs of the planned shapes, forward alone
(precompute) and forward and backward (training). No optimiser, no reading of files and no other phase is timed.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from blockskip.errors import OutOfMemory
from blockskip.families import stack_text
from blockskip.memory import is_out_of_memory, release
from blockskip.method.layout import State
from blockskip.method.skipping import install_stubs, run_block
from blockskip.planner.around import latent_shape
from blockskip.planner.counting import LiveBytes
from blockskip.planner.encoding import encode_text
from blockskip.planner.parts import empty_part
from blockskip.planner.plan import Plan
from blockskip.planner.setting import Setting
from blockskip.precision import compute, denormals_flushed, resolve_device, resolve_dtype

#: Timings of which the shortest counts.
REPEATS = 3


@dataclasses.dataclass(frozen=True)
class Speed:
    """Floating-point operations a second of this machine, inside blocks.

    Args:
        forward: without a graph, as in precompute.
        training: forward and backward together.
        device, dtype: names.
    """

    forward: float
    training: float
    device: str
    dtype: str


def measure(setting: Setting) -> Speed:
    """The speed of one block of each kind, weighted by how many the model has of it.

    Raises:
        OutOfMemory: a block does not fit into this machine.
    """
    device = resolve_device("auto")
    dtype = setting.dtype if device.type == setting.device.type else resolve_dtype("auto", device)
    try:
        with denormals_flushed():
            return _measure(setting, device, dtype)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory("--measure: a block of the model does not fit into this machine; plan without it.") from None
    finally:
        release()


def timed(plan: Plan, speed: Speed) -> Plan:
    """The plan with seconds of precompute, training and a preview, from their counted work."""
    phases = dict(plan.phases)
    for name, rate in (("precompute", speed.forward), ("train", speed.training), ("preview", speed.forward)):
        if phases[name].used or name == "preview":
            phases[name] = dataclasses.replace(phases[name], seconds=phases[name].flops / rate)
    remark = (
        f"Times are estimates: the counted work at the speed of single blocks with random weights on this machine "
        f"({speed.device}, {speed.dtype}), without reading weights and features and without the optimiser."
    )
    return dataclasses.replace(plan, phases=phases, remarks=(*plan.remarks, remark))


def _measure(setting: Setting, device: torch.device, dtype: torch.dtype) -> Speed:
    layout = setting.source.family.layout
    with torch.random.fork_rng(devices=[]):
        model = empty_part(setting.source, "transformer", dtype)
        empty = install_stubs(model, layout, range(setting.num_blocks))
        _materialise(model, device)
        _, text = encode_text(setting)
        text = {
            name: _random(value.shape, dtype if value.is_floating_point() else value.dtype, device)
            for name, value in text.items()
        }
        inputs = _inputs(setting, text, device, dtype)
        kinds: dict[tuple[Any, ...], list[int]] = {}
        for index, block in empty.items():
            shapes = tuple((name, tuple(value.shape)) for name, value in block.named_parameters())
            kinds.setdefault((type(block), shapes), []).append(index)
        state: State | None = None
        work = forward = training = 0.0
        trained = 0.0
        for indices in kinds.values():
            block = _materialise(empty.pop(indices[0]), device)
            stub = layout.replace(model, indices[0], block)
            call: dict[str, Any] = {}
            hook = block.register_forward_pre_hook(
                lambda _, args, kwargs, call=call: call.update(args=args, kwargs=kwargs), with_kwargs=True
            )
            with torch.no_grad(), compute(device, dtype):
                state, _ = run_block(model, layout, indices[0], state, inputs)
            hook.remove()
            layout.replace(model, indices[0], stub)
            once, twice, counts = _time(block, call, device, dtype)
            forward, training = forward + len(indices) * once, training + len(indices) * twice
            work, trained = work + len(indices) * counts[0], trained + len(indices) * counts[1]
            del block, call
    return Speed(work / forward, trained / training, device.type, str(dtype).removeprefix("torch."))


def _inputs(
    setting: Setting, text: Mapping[str, torch.Tensor], device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    batch = setting.config.train.batch_size
    shape = (batch, *latent_shape(setting, *setting.size))
    latents, noise = torch.randn(shape).to(device), torch.randn(shape).to(device)
    sigma = torch.full((batch,), 0.5, device=device)
    family, config = setting.source.family, setting.source.config("transformer")
    places = torch.rand(batch, 4).to(device) if setting.config.patches.positions == "picture" else None
    own = stack_text([dict(text)] * batch)
    return family.noisy_inputs(config, latents, noise, sigma, own, setting.guidance, dtype, places)


def _time(
    block: nn.Module, call: dict[str, Any], device: torch.device, dtype: torch.dtype
) -> tuple[float, float, tuple[int, int]]:
    """(seconds forward, seconds forward and backward, the work of both) of a block on what it was called with."""

    def forward() -> None:
        with torch.no_grad(), compute(device, dtype):
            block(*call["args"], **call["kwargs"])

    def both() -> None:
        args, kwargs = tree_map(_with_gradient, (call["args"], call["kwargs"]))
        with torch.enable_grad():
            with compute(device, dtype):
                returned = block(*args, **kwargs)
            outputs = [value for value in (returned if isinstance(returned, tuple) else (returned,))
                       if isinstance(value, torch.Tensor) and value.requires_grad]  # fmt: skip
            torch.autograd.backward(outputs, [torch.ones_like(value) for value in outputs])

    counts = []
    for function in (forward, both):
        with LiveBytes() as live:
            function()
        counts.append(live.flops)
    return _shortest(forward, device), _shortest(both, device), (counts[0], counts[1])


def _shortest(function: Callable[[], None], device: torch.device) -> float:
    times = []
    for _ in range(REPEATS):
        _wait(device)
        begun = time.perf_counter()
        function()
        _wait(device)
        times.append(time.perf_counter() - begun)
    return max(min(times), 1e-9)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    elif device.type == "mps":
        torch.mps.synchronize()


def _with_gradient(value: Any) -> Any:
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.detach().requires_grad_() if floating else value


def _materialise(module: nn.Module, device: torch.device) -> nn.Module:
    """Random weights, small enough for finite outputs, in place of the meta device's."""
    for part in module.modules():
        for name, value in part._parameters.items():
            if value is not None and value.is_meta:
                part._parameters[name] = nn.Parameter(_random(value.shape, value.dtype, device), requires_grad=False)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.to(device)
    return module


def _random(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if not dtype.is_floating_point:
        return torch.ones(shape, dtype=dtype, device=device)
    return torch.empty(shape, dtype=dtype, device=device).normal_(0, 0.02)
