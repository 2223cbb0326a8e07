"""What the phases of the transformer take: its kernels run on fake tensors at the model's true size, and live bytes are
counted.

Device memory is what the counter saw. Host memory is made of the same tensors where they wait, of the stores' buffers
and of the weights files as they are read; how much of each is written down by name.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from blockskip.adapters.frozen import FrozenAdapters
from blockskip.families import Text
from blockskip.features.precompute import Input, Window
from blockskip.loading.quantized import PIECE
from blockskip.loading.transformer import empty_transformer
from blockskip.method.ahead import AheadOfBlocks
from blockskip.method.layout import State
from blockskip.method.skipping import Features, inner_features, install_stubs, run_block, run_head, span_features
from blockskip.planner.alternating import turns
from blockskip.planner.around import CPU, bytes_of, finish, kernel, new, new_group, reading
from blockskip.planner.autocast import like_device
from blockskip.planner.counting import HOST, LiveBytes
from blockskip.planner.fakes import Different, FakeBlocks, FakeTraining
from blockskip.planner.lisa import changed_bytes, hardest_steps
from blockskip.planner.parts import fake_tensors, stored_dtype
from blockskip.planner.plan import PhasePlan
from blockskip.planner.setting import Setting, window_bytes
from blockskip.planner.updates import fake_optimizer, make_state, update
from blockskip.store.behind import THREADS, WAITING
from blockskip.store.int8 import quantize_tokens
from blockskip.training.optimizer import parameter_state
from blockskip.training.step import MicroBatch, training_loss

#: Groups that the stores read ahead while one is used (``GroupStore.read_ahead``).
AHEAD = 2


def precompute(setting: Setting, text: Text, adapters: FrozenAdapters | None = None) -> tuple[PhasePlan, Features]:
    """Block by block over windows of groups; the features of one group come with it."""
    source, split, layout = setting.source, setting.stored, setting.source.family.layout
    if not setting.rule.stores(split):
        return PhasePlan(used=False), {}
    stop, (start, end) = split.passes, split.inner if setting.rule.uses_tail else (0, 0)
    live = LiveBytes()
    blocks = FakeBlocks(setting, live)
    with fake_tensors(), torch.no_grad():
        with live:
            blocks.fill()
            live.reset_peaks()
            weights = live.now["weights"]
            seen: dict[object, int] = {}
            state: State | None = None
            front: State | None = None
            sides: dict[int, State] = {}  # what leaves the block before a run inside, and its last block
            entered = tail = head = None
            largest, ahead, outputs = 0, AheadOfBlocks(blocks.model, layout), list[Any]()
            for index in range(setting.num_blocks if stop is None else stop):
                kind = (
                    min(index, 2),
                    blocks.kind(index),
                    state and {name: tuple(value.shape) for name, value in state.items()},
                )
                key = repr(kind)
                edge = index in (split.front - 1, setting.num_blocks - split.tail, start - 1, end - 1)
                if key not in seen or edge:
                    before, entered = live.flops, None
                    with kernel(setting), blocks.block(index) as block:
                        largest = max(largest, sum(value.numel() for value in block.parameters()))
                        if adapters is not None:
                            adapters.attach(block, layout.names(blocks.model)[index])
                        with _ahead(setting, ahead, outputs, index):
                            state, entered = run_block(
                                blocks.model, layout, index, _here(setting, state), _inputs(setting, text)
                            )
                    if index == 1:
                        live.tag([value for value in tree_leaves(outputs) if isinstance(value, torch.Tensor)], HOST)
                    seen[key] = live.flops - before
                    state = _away(live, state)
                else:
                    live.flops += seen[key]
                front = dict(state) if index == split.front - 1 and state else front
                if index in (start - 1, end - 1):
                    sides[index] = dict(state or {})
                tail = (
                    _away(live, {"entered": entered})["entered"] if index == setting.num_blocks - split.tail else tail
                )
            assert state is not None
            if stop is None:
                with kernel(setting), _ahead(setting, ahead, outputs, setting.num_blocks):
                    _, head = run_head(blocks.model, layout, _here(setting, state) or {}, _inputs(setting, text))
            live.add_to_peaks(blocks.bytes_ahead if stop != 1 else 0, "weights")
            features = span_features(layout, setting.rule, front, tail, head)
            if sides:
                features |= inner_features(setting.rule, sides[start - 1], sides[end - 1])
            if setting.config.features.dtype == "int8":
                with live.role(HOST):
                    features = quantize_tokens(features)
        window_of = Window(blocks, source, split, setting.rule, stop, setting.dtype, CPU, setting.guidance)
        with like_device(setting.device), Different():
            group = window_of.group_bytes(Input("", *new_group(setting, text)))
        sizes = [_values(block) for index, block in blocks.empty.items() if stop is None or index < stop]
    own_turns = turns(setting, bytes_of(features))
    computed = [turn.computed for turn in own_turns if turn.computed]
    fits = max(1, window_bytes(setting) // group)
    window, windows = min(fits, max(computed)), sum(-(-groups // fits) for groups in computed)
    frame = sum(value.numel() for value in blocks.model.parameters())
    texts = {"encoded text": setting.captions * bytes_of(text)}
    host = reading(setting, "transformer", largest, blocks.largest_tensor)
    own = sum(value.nbytes for value in state.values())  # its streams may be views of one tensor
    on_disk = setting.config.features.window_on == "disk"
    host |= {"window of states": group if on_disk else window * group} | texts
    if windows > len(computed) or on_disk:  # groups of the window, or the one before, may be on their way to the disk
        host["written groups"] = min(window, THREADS + WAITING) * bytes_of(features)
    if setting.pool:  # the group that was run is one of the window
        host["window of states"] -= min(host["window of states"], own)
    written = max(turn.stored for turn in own_turns) * bytes_of(features)
    # every time: what is around the blocks, the first block to see how large a group is, and for each window all blocks
    values = windows * sum(sizes) + len(computed) * (_values(blocks.model) + sizes[0])
    reads = values * stored_dtype(source, "transformer").itemsize
    if on_disk:
        written += window * group
        reads += sum(computed) * len(sizes) * (group - window_of.kept_states * own)
    before = texts | reading(setting, "transformer", frame, frame)
    return finish(
        setting, live, host, before, weights, disk_bytes=written, read_bytes=reads,
        flops_forward=sum(computed) * live.flops,
    ), features  # fmt: skip


def _values(module: nn.Module) -> int:
    """How many values of a module are in the weights file."""
    return sum(value.numel() for value in module.state_dict().values())


@contextlib.contextmanager
def _ahead(setting: Setting, ahead: AheadOfBlocks, outputs: list[Any], index: int) -> Iterator[None]:
    """As the streamed transformer does: what precedes the blocks is computed in passes 0 and 1 and then given."""
    if index == 0:
        yield
    elif index == 1:
        with Different(), ahead.kept() as kept:
            yield
        outputs += kept
    else:
        here = outputs if setting.pool else tree_map_only(torch.Tensor, torch.clone, outputs)
        with ahead.given(here, CPU):
            yield


def _inputs(setting: Setting, text: Text) -> dict[str, object]:
    family, config = setting.source.family, setting.source.config("transformer")
    *drawn, places = new_group(setting, text)
    return family.noisy_inputs(config, *drawn, setting.guidance, setting.dtype, places)


def _here(setting: Setting, state: State | None) -> State | None:
    """A state as the device holds it: a copy, where the device is not the host."""
    if state is None or setting.pool:
        return state
    return {name: value.clone() for name, value in state.items()}


def _away(live: LiveBytes, state: Mapping[str, torch.Tensor | None]) -> State:
    """A state where it waits, in host memory."""
    kept = {name: value for name, value in state.items() if value is not None}
    live.tag(kept.values(), HOST)
    return kept


@dataclass(frozen=True)
class Trained:
    """What training takes.

    Args:
        adapter: bytes of the LoRA parameters; with LISA of all weights that were changed.
        active: bytes of those on the device: with LISA the masters of the blocks that are trained at a time.
        optimizer: bytes of the optimiser's state: of the parameters that a gradient reaches.
        resident: bytes of weights that stay on the device between two steps.
        step: the optimiser step that was counted, from 0.
        loaded: bytes that are read whenever training begins: of all weights but those of skipped and visiting blocks.
    """

    plan: PhasePlan
    adapter: int
    active: int
    optimizer: int
    resident: int
    step: int = 0
    loaded: int = 0


def train(setting: Setting, text: Text, features: Features, adapters: FrozenAdapters | None = None) -> Trained:
    """One optimiser step with the optimiser's state in place; with LISA that of the hardest period."""
    steps = [_train(setting, text, features, adapters, step) for step in hardest_steps(setting)]
    return max(steps, key=lambda trained: trained.plan.device_peak_bytes)


def _train(setting: Setting, text: Text, features: Features, adapters: FrozenAdapters | None, step: int) -> Trained:
    source, config = setting.source, setting.config
    accumulation = config.train.gradient_accumulation_steps
    live = LiveBytes()
    training = FakeTraining(setting, live, step)
    model = training.skipped
    with fake_tensors(), live:
        parameters = training.fill()
        if adapters is not None:
            adapters.attach(model.model, device=CPU)
        optimizer = fake_optimizer(parameters, config.train)
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        live.tag([parameter.grad for parameter in parameters], "gradients")
        with live.role("optimizer"):
            make_state(optimizer, parameters)
        if accumulation == 1:
            optimizer.zero_grad(set_to_none=True)
        model.model.train()
        live.reset_peaks()
        live.flops, weights = 0, live.now["weights"]
        with live.role("other"):
            latents, noise, sigma, own, places = new_group(setting, text)
            weight = new((config.train.batch_size,))
            stored = {name: new(tuple(value.shape), value.dtype) for name, value in features.items()}
        batch = MicroBatch(latents, noise, sigma, weight, own, stored, places).needed(setting.family)
        del own
        own_config = source.config("transformer")
        with kernel(setting):
            loss = training_loss(model, setting.family, own_config, batch, setting.guidance, setting.dtype)
        forward = live.flops
        (loss / accumulation).backward()
        backward = live.flops - forward
        del loss
        with live.role("optimizer"):
            nn.utils.clip_grad_norm_(parameters, config.train.max_grad_norm or float("inf"))
            update(optimizer, parameters)
        live.add_to_peaks(training.bytes_ahead, "weights")
        state = {id(value): bytes_of(parameter_state(optimizer, value)) for value in parameters}
        for parameter in parameters:
            if id(parameter) not in training.reached:  # AdamW passes it over, and makes no state for it
                live.add_to_peaks(-state.pop(id(parameter)), "optimizer")
                live.add_to_peaks(-parameter.nbytes if accumulation > 1 else 0, "gradients")
        resident = live.now["weights"] + training.bytes_ahead
    steps, item = config.train.steps * accumulation, stored_dtype(source, "transformer").itemsize
    group = bytes_of(features) + bytes_of({"latents": latents})
    texts = {"encoded text": setting.captions * bytes_of(text)}
    before = texts | reading(setting, "transformer", training.kept(), training.kept())
    host = {"read ahead": (AHEAD + 1) * group} | texts
    active = training.adapter_bytes
    changed = changed_bytes(setting) or active
    if setting.dtype != torch.float32 and changed > active:
        host["masters"] = changed - active
    if setting.streamed:
        host |= reading(setting, "transformer", training.largest_streamed, training.largest_tensor)
    if config.model.quantization != "none":  # of one layer; a piece of it at a time is on its way to its packed form
        quantizing = texts | {"weights file": training.largest_tensor * item, "piece": PIECE * setting.dtype.itemsize}
        before = max(before, quantizing, key=lambda one: sum(one.values()))
    reads = 2 * training.streamed_values * item  # forward and backward
    plan = finish(
        setting, live, host, before, weights, read_bytes=steps * (group + reads), flops_forward=steps * forward,
        flops_backward=steps * backward,
    )  # fmt: skip
    whole = empty_transformer(source)
    install_stubs(whole, source.family.layout, sorted({*range(setting.num_blocks)} - {*setting.resident}))
    return Trained(plan, changed, active, sum(state.values()), resident, step, _values(whole) * item)


def begun_often(setting: Setting, trained: Trained, features: Features) -> PhasePlan:
    """The plan of training with what is read to begin it: at first, and after each precompute and preview."""
    often = len(turns(setting, bytes_of(features)))
    return dataclasses.replace(trained.plan, read_bytes=trained.plan.read_bytes + often * trained.loaded)


def save(setting: Setting, trained: Trained) -> PhasePlan:
    """Checkpoints and the adapter's file, between two steps: what is resident stays, copies go to the host."""
    checkpoint = trained.adapter + trained.optimizer
    resident = {"weights": trained.resident, "adapters": trained.active, "optimizer": trained.optimizer}
    limit = setting.config.train.checkpoints_total_limit
    steps, every = setting.config.train.steps, setting.config.train.checkpoint_every
    made = 1 if not every else -(-steps // every)
    held = sum(resident.values())
    waiting = ("read ahead", "encoded text", "masters")
    host = {name: trained.plan.host[name] for name in waiting if name in trained.plan.host}
    host["copies to write"] = trained.adapter if setting.pool else checkpoint
    return PhasePlan(
        held, dict.fromkeys(trained.plan.device, 0) | resident,
        sum(host.values()) + (held if setting.pool else 0), host,
        trained.adapter + checkpoint * ((min(made, limit) if limit else made) + 1),
    )  # fmt: skip
