"""What each phase takes: its own kernel runs on fake tensors at the model's true size, and live bytes are counted.

Device memory is what the counter saw. Host memory is made of the same tensors where they wait, of the stores' buffers
and of the weights files as they are read; how much of each is written down by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from blockskip.adapters.frozen import FrozenAdapters
from blockskip.families import Text, stack_text
from blockskip.features.precompute import Input, Window
from blockskip.loading.encoders import TOGETHER, layer_names
from blockskip.method.ahead import AheadOfBlocks
from blockskip.method.layout import State
from blockskip.method.skipping import Features, run_block, run_head, span_features
from blockskip.planner.autocast import like_device
from blockskip.planner.counting import HOST, LiveBytes
from blockskip.planner.fakes import Different, FakeBlocks, FakeTraining, visiting_layers
from blockskip.planner.parts import empty_part, fake, fake_tensors, stored_dtype
from blockskip.planner.plan import PhasePlan, counted
from blockskip.planner.setting import Setting, disk_limit, window_bytes
from blockskip.precision import compute
from blockskip.store.behind import THREADS, WAITING
from blockskip.training.optimizer import make_optimizer
from blockskip.training.step import MicroBatch, training_loss

CPU = torch.device("cpu")
#: Groups that the stores read ahead while one is used (``GroupStore.read_ahead``).
AHEAD = 2
#: How many copies of the adapter a checkpoint holds: itself and AdamW's two moments.
CHECKPOINT_COPIES = 3


def bytes_of(tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes of named tensors; an expanded tensor counts by its storage."""
    return sum(value.untyped_storage().nbytes() for value in tensors.values())


@contextlib.contextmanager
def kernel(setting: Setting) -> Iterator[None]:
    """The surroundings of a kernel on the planned device."""
    with like_device(setting.device), compute(CPU, setting.dtype):
        yield


def new(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor without values."""
    return torch.empty(shape, dtype=dtype)


def latent_shape(setting: Setting, width: int, height: int) -> tuple[int, int, int]:
    """(C, h, w) of the latents of a picture in pixels."""
    vae = setting.source.config("vae")
    factor = setting.source.family.vae_factor(vae)
    return setting.source.family.latent_channels(vae), height // factor, width // factor


def loading(setting: Setting, part: str, parameters: int, mapped: int | None = None) -> dict[str, int]:
    """Host memory that weights files take while a part is read.

    Args:
        parameters: values that are kept.
        mapped: values of the file that are in memory at once; default: all that are kept.
    """
    stored = stored_dtype(setting.source, part)
    size = torch.empty((), dtype=stored, device="meta").element_size()
    if setting.pool and stored == setting.dtype:
        return {}  # the tensors are the mapped file itself
    return {"weights file": (parameters if mapped is None else mapped) * size}


def finish(setting: Setting, live: LiveBytes, host: dict[str, int], **others: object) -> PhasePlan:
    """The phase; where device and host are one memory, the host holds both."""
    held = sum(host.values())
    peak = live.pool_peak + held if setting.pool else held
    return counted(live, host_peak_bytes=peak, host=host, **others)


def encode_text(setting: Setting) -> tuple[PhasePlan, Text]:
    """One text encoder after the other; the conditioning tensors of one prompt come with it."""
    source, family = setting.source, setting.source.family
    streamed = setting.config.model.stream_text_encoders
    text: Text = {}
    plans, flops, read = [], 0, 0
    counts = family.token_counts(setting.text_length)
    fakes = fake_tensors()
    for _, part in source.text_parts:
        live = LiveBytes()
        encoder = empty_part(source, part, setting.dtype)
        longest = getattr(encoder.config, "max_position_embeddings", None)
        total = sum(value.numel() for value in encoder.parameters())
        names = layer_names(encoder) if streamed else []
        largest = max(
            (sum(v.numel() for v in encoder.get_submodule(name).parameters()) for name in names), default=total
        )
        with fakes, live, _placed(encoder, names, live) as waiting, torch.no_grad(), kernel(setting):
            live.reset_peaks()
            ids = {
                name: torch.ones(1, min(count, longest or count), dtype=torch.int64) for name, count in counts.items()
            }
            text |= family.encode_text({part: encoder}, ids)
        if waiting:  # the other prompts that share the reading of a layer wait ahead of it, or of the next one
            live.add_to_peaks((min(TOGETHER, setting.captions) - 1) * max(waiting))
        flops += live.flops
        read += total
        host = loading(setting, part, total, largest)
        plans.append(finish(setting, live, host))
        del encoder
    with fakes:
        text = family.join_text(source.config("transformer"), text, setting.text_length)
    largest_plan = max(plans, key=lambda plan: (plan.device_peak_bytes, plan.host_peak_bytes))
    texts = setting.captions * bytes_of(text)
    host = largest_plan.host | {"encoded text": texts}
    return PhasePlan(
        largest_plan.device_peak_bytes, largest_plan.device, max(plan.host_peak_bytes for plan in plans) + texts, host,
        texts, read * stored_dtype(source, source.text_parts[-1][1]).itemsize, flops * setting.captions,
    ), text  # fmt: skip


@contextlib.contextmanager
def _placed(encoder: nn.Module, layers: list[str], live: LiveBytes) -> Iterator[list[int]]:
    if layers:
        with visiting_layers(encoder, layers, live) as waiting:
            yield waiting
        return
    fake(encoder)
    live.tag_module(encoder)
    yield []


def encode_pictures(setting: Setting) -> PhasePlan:
    """The autoencoder over one group at a time."""
    source, config = setting.source, setting.config
    batch, (width, height) = config.train.batch_size, setting.size
    vae = empty_part(source, "vae", setting.dtype)
    with fake_tensors():
        live = LiveBytes()
        with live:
            fake(vae)
            live.tag_module(vae)
            live.reset_peaks()
            shape = (batch, *latent_shape(setting, width, height))
            with torch.no_grad(), kernel(setting):
                pixels = new((batch, 3, height, width), setting.dtype)
                latents = source.family.encode_pixels(vae, pixels, new(shape)).float()
        stored = bytes_of({"latents": latents})
        total = sum(value.numel() for value in vae.parameters())
    full = config.data.full_resolution or height
    host = loading(setting, "vae", total)
    host |= {"pictures": 3 * full * full * 4, "pixels": batch * 3 * height * width * 4}
    return finish(
        setting, live, host, disk_bytes=setting.groups * stored,
        read_bytes=total * stored_dtype(source, "vae").itemsize, flops_forward=setting.groups * live.flops,
    )  # fmt: skip


def _group(setting: Setting, text: Text) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Text]:
    batch = setting.config.train.batch_size
    shape = (batch, *latent_shape(setting, *setting.size))
    own = {name: new(tuple(value.shape), value.dtype) for name, value in text.items()}
    return new(shape), new(shape), new((batch,)), stack_text([own] * batch)


def precompute(setting: Setting, text: Text, adapters: FrozenAdapters | None = None) -> tuple[PhasePlan, Features]:
    """Block by block over windows of groups; the features of one group come with it."""
    source, split, layout = setting.source, setting.stored, setting.source.family.layout
    if not setting.rule.stores(split):
        return PhasePlan(used=False), {}
    stop = None if split.tail else split.front
    live = LiveBytes()
    blocks = FakeBlocks(setting, live)
    with fake_tensors(), torch.no_grad():
        with live:
            blocks.fill()
            live.reset_peaks()
            seen: dict[object, int] = {}
            state: State | None = None
            front: State | None = None
            entered = tail = head = None
            largest, ahead, outputs = 0, AheadOfBlocks(blocks.model, layout), list[Any]()
            for index in range(setting.num_blocks if stop is None else stop):
                kind = (
                    min(index, 2),
                    blocks.kind(index),
                    state and {name: tuple(value.shape) for name, value in state.items()},
                )
                key = repr(kind)
                edge = index in (split.front - 1, setting.num_blocks - split.tail)
                if key not in seen or edge:
                    before = live.flops
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
                tail = (
                    _away(live, {"entered": entered})["entered"] if index == setting.num_blocks - split.tail else tail
                )
            assert state is not None
            if stop is None:
                with kernel(setting), _ahead(setting, ahead, outputs, setting.num_blocks):
                    _, head = run_head(blocks.model, layout, _here(setting, state) or {}, _inputs(setting, text))
            features = span_features(layout, setting.rule, front, tail, head)
        window_of = Window(blocks, source, split, setting.rule, stop, setting.dtype, CPU, setting.guidance)
        with like_device(setting.device), Different():
            group = window_of.group_bytes(Input("", *_group(setting, text)))
        total = sum(value.numel() for block in blocks.empty.values() for value in block.parameters())
    window = min(setting.groups, max(1, window_bytes(setting) // group))
    windows = -(-setting.groups // window)
    stored = setting.groups * bytes_of(features)
    limit = disk_limit(setting)
    host = loading(setting, "transformer", total, largest)
    host |= {"window of states": window * group, "encoded text": setting.captions * bytes_of(text)}
    if windows > 1:  # groups of the window before may still be on their way to the disk
        host["written groups"] = min(window, THREADS + WAITING) * bytes_of(features)
    if setting.pool:  # the group that was run is one of the window
        host["window of states"] -= min(window * group, bytes_of(state))
    return finish(
        setting, live, host, disk_bytes=stored if limit is None else min(stored, limit),
        read_bytes=windows * total * stored_dtype(source, "transformer").itemsize,
        flops_forward=setting.groups * live.flops,
    ), features  # fmt: skip


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
    latents, noise, sigma, own = _group(setting, text)
    return family.noisy_inputs(config, latents, noise, sigma, own, setting.guidance, setting.dtype)


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


def train(
    setting: Setting, text: Text, features: Features, adapters: FrozenAdapters | None = None
) -> tuple[PhasePlan, int]:
    """One optimiser step with the optimiser's state in place; the adapter's bytes come with it."""
    source, config = setting.source, setting.config
    accumulation = config.train.gradient_accumulation_steps
    live = LiveBytes()
    training = FakeTraining(setting, live)
    model = training.skipped
    with fake_tensors(), live:
        parameters = training.fill()
        if adapters is not None:
            adapters.attach(model.model, device=CPU)
        optimizer = make_optimizer(parameters, config.train)
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        live.tag([parameter.grad for parameter in parameters], "gradients")
        with live.role("optimizer"):
            optimizer.step()  # makes the state
        if accumulation == 1:
            optimizer.zero_grad(set_to_none=True)
        model.model.train()
        live.reset_peaks()
        live.flops = 0
        with live.role("other"):
            latents, noise, sigma, own = _group(setting, text)
            weight = new((config.train.batch_size,))
            stored = {name: new(tuple(value.shape), value.dtype) for name, value in features.items()}
        batch = MicroBatch(latents, noise, sigma, weight, own, stored)
        own_config = source.config("transformer")
        with kernel(setting):
            family = source.family
            loss = training_loss(model, family, own_config, batch, setting.guidance, setting.dtype)
        forward = live.flops
        (loss / accumulation).backward()
        backward = live.flops - forward
        del loss
        with live.role("optimizer"):
            nn.utils.clip_grad_norm_(parameters, config.train.max_grad_norm or float("inf"))
            optimizer.step()
        live.add_to_peaks(training.bytes_ahead, "weights")
        adapter = sum(value.numel() * value.element_size() for value in parameters)
        kept, block = training.kept(), training.block_parameters
    steps = config.train.steps * accumulation
    quantized = config.model.quantization != "none"
    largest = training.largest_tensor if quantized else block if setting.streamed else 0
    group = bytes_of(features) + bytes_of({"latents": latents})
    host = loading(setting, "transformer", kept, max(kept, largest))
    if quantized and not host:  # the one that is being quantised; the others are the file itself
        host = {"weights file": largest * stored_dtype(source, "transformer").itemsize}
    host |= {"read ahead": (AHEAD + 1) * group, "encoded text": setting.captions * bytes_of(text)}
    reads = 2 * len(setting.streamed) * block * stored_dtype(source, "transformer").itemsize
    return finish(
        setting, live, host, read_bytes=steps * (group + reads), flops_forward=steps * forward,
        flops_backward=steps * backward,
    ), adapter  # fmt: skip


def save(setting: Setting, adapter: int, train_plan: PhasePlan) -> PhasePlan:
    """Checkpoints and the adapter's file, from a small table: what is resident stays, copies go to the host."""
    checkpoint = CHECKPOINT_COPIES * adapter
    resident = {role: train_plan.device[role] for role in ("weights", "adapters", "optimizer")}
    device = dict.fromkeys(train_plan.device, 0) | resident
    limit = setting.config.train.checkpoints_total_limit
    steps, every = setting.config.train.steps, setting.config.train.checkpoint_every
    made = 1 if not every else -(-steps // every)
    copies = checkpoint if not setting.pool else adapter
    held = sum(resident.values())
    return PhasePlan(
        held, device, copies + (held if setting.pool else 0), {"copies to write": copies},
        adapter + checkpoint * ((min(made, limit) if limit else made) + 1),
    )  # fmt: skip
