"""Real phases on a tiny pipeline, their real tensors counted: what a plan is held to."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from blockskip.adapters.frozen import FrozenAdapters
from blockskip.adapters.lora import add_lora
from blockskip.config import (
    Config,
    DataConfig,
    FeaturesConfig,
    LoraConfig,
    ModelConfig,
    PatchesConfig,
    PreviewConfig,
    SkipConfig,
    TrainConfig,
)
from blockskip.encoding.text import encode_prompts
from blockskip.families import Text, stack_text
from blockskip.loading.autoencoder import load_autoencoder
from blockskip.loading.encoders import StreamedEncoder
from blockskip.loading.source import ModelSource
from blockskip.loading.streaming import stream_blocks
from blockskip.loading.transformer import StreamedTransformer, load_transformer
from blockskip.loading.weights import Weights
from blockskip.method.ahead import AheadOfBlocks
from blockskip.method.layout import State
from blockskip.method.skipping import Features, SkippedModel
from blockskip.planner.counting import HOST, LiveBytes, tables
from blockskip.planner.setting import Setting, make_setting
from blockskip.precision import compute
from blockskip.training.lisa import LisaBlocks
from blockskip.training.loop import Trainer
from blockskip.training.step import MicroBatch

CPU = torch.device("cpu")
SIDE, LENGTH = 64, 16
PROMPT = "a photo of sks dog on the beach with a red ball and a kite, " * 3  # longer than LENGTH


def setting_of(
    source: ModelSource,
    *,
    skip: tuple[int, int] = (1, 1),
    rank: int = 4,
    batch: int = 1,
    accumulation: int = 1,
    model: dict[str, Any] | None = None,
    **train: Any,
) -> Setting:
    """A setting for a tiny pipeline on the CPU; ``train`` may hold settings of other sections too."""
    modes, preview = (
        {name: train.pop(name) for name in ("front_mode", "tail_mode") if name in train},
        train.pop("preview", {}),
    )
    features = train.pop("features", {})
    inner = {name: train.pop(name) for name in ("middle", "middle_start") if name in train}
    ends = inner or {"front": skip[0], "tail": skip[1]}
    config = Config(
        model=ModelConfig(**({"dtype": "float32"} | (model or {}))),
        data=DataConfig(resolution=SIDE, full_resolution=SIDE, text_length=LENGTH),
        patches=PatchesConfig(positions=train.pop("positions", "patch")),
        skip=SkipConfig(**ends, **modes),
        lora=LoraConfig(rank=rank, freeze_a=train.pop("freeze_a", False)),
        train=TrainConfig(steps=3, batch_size=batch, gradient_accumulation_steps=accumulation, **train),
        features=FeaturesConfig(**features),
        preview=PreviewConfig(**({"prompts": (PROMPT,), "height": SIDE, "width": SIDE} | preview)),
    )
    return make_setting(source, config, CPU)


def shaped_like(tensors: Text | Features) -> dict[str, torch.Tensor]:
    """Real tensors of the shapes and dtypes of fake ones; masks are whole."""
    return {
        name: torch.ones(tuple(value.shape), dtype=value.dtype)
        if not value.is_floating_point()
        else torch.randn(tuple(value.shape)).to(value.dtype)
        for name, value in tensors.items()
    }


def text_of(setting: Setting) -> Text:
    """The conditioning tensors of a prompt of the setting's length, by the real encoders."""
    return encode_prompts(setting.source, [PROMPT], setting.text_length, setting.dtype, CPU)[0]


def drawn(setting: Setting, text: Text) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Text, torch.Tensor | None]:
    """Latents, noise, noise levels, text and places of a group."""
    batch, vae = setting.config.train.batch_size, setting.source.config("vae")
    factor = setting.source.family.vae_factor(vae)
    shape = (batch, setting.source.family.latent_channels(vae), setting.size[1] // factor, setting.size[0] // factor)
    own = {name: value.clone() for name, value in text.items()}
    places = torch.rand(batch, 4) if setting.config.patches.positions == "picture" else None
    return torch.randn(shape), torch.randn(shape), torch.rand(batch), stack_text([own] * batch), places


@contextmanager
def read_blocks_are_weights(live: LiveBytes) -> Iterator[None]:
    """What is read of a weights file meanwhile is counted as weights."""
    inside = Weights.inside

    def counted(*args: Any) -> dict[str, torch.Tensor]:
        with live.role(HOST):  # the mapped file, where the block has another dtype
            found = inside(*args)
        live.tag(found.values(), "weights")
        return found

    Weights.inside = counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        Weights.inside = inside  # type: ignore[method-assign]


def train(setting: Setting, text: Text, features: Features, folder: Path, step_number: int = 0) -> LiveBytes:
    """An optimiser step as the run does it, counted: the second one, when the optimiser has its state."""
    config, source = setting.config, setting.source
    live, placed = LiveBytes(), (setting.dtype, CPU, FrozenAdapters([]))
    absent = sorted({*range(setting.num_blocks)} - {*setting.resident})
    model = load_transformer(source, absent, *placed, config.model.quantization)
    if setting.streamed:
        stream_blocks(model, source, setting.streamed, *placed)
    stubbed = SkippedModel(model, source.family.layout, setting.stored, setting.rule)
    lora = config.lora
    assert lora.lora_alpha is not None
    blocks, parameters = None, []
    if config.train.lisa_blocks:
        own = config.train
        blocks = LisaBlocks(model, source.family.layout, own.lisa_blocks, own.lisa_period, own.seed)
    else:
        parameters = add_lora(model, setting.targets, lora.rank, lora.lora_alpha, lora.dropout, 0, lora.freeze_a)
    if config.train.gradient_checkpointing:
        source.family.enable_checkpointing(model)
    trainer = Trainer(
        stubbed, parameters, source.family, source.config("transformer"), config.train, 0.0, setting.guidance,
        setting.dtype, CPU, folder, {}, blocks=blocks,
    )  # fmt: skip
    if blocks is not None:
        trainer.step = step_number
        trainer._begin_step()
        parameters = trainer.parameters
    trainer.model.model.train()
    latents, noise, sigma, own, places = drawn(setting, text)
    weight, found = torch.ones(config.train.batch_size), shaped_like(features)
    batch = MicroBatch(latents, noise, sigma, weight, own, found, places)

    def step() -> None:
        live.tag([batch.latents, batch.noise, batch.sigma, batch.weight], "other")
        live.tag([*batch.text.values(), *batch.features.values()], "other")
        total = sum(trainer.micro_step(batch, micro) for micro in range(config.train.gradient_accumulation_steps))
        with live.role("optimizer"):
            trainer.update(total)

    trained = {id(value) for value in parameters}
    with live, read_blocks_are_weights(live):
        frozen = [value for value in model.parameters() if id(value) not in trained and not value.is_meta]
        live.tag([*frozen, *(value for value in model.buffers() if not value.is_meta)], "weights")
        live.tag([*parameters, *(value for name, value in model.named_parameters() if "lora_" in name)], "adapters")
        live.tag(tables(model), "weights")
        live.watch_gradients(parameters)
        for parameter, master in blocks.pairs.values() if blocks is not None else ():
            if master is not parameter:
                parameter.register_post_accumulate_grad_hook(lambda _, m=master: live.tag([m.grad], "gradients"))
        step()
        live.reset_peaks()
        live.flops = 0
        step()
    return live


def precomputed(setting: Setting, text: Text) -> LiveBytes:
    """One group through the blocks as the run does it, counted; what waits is host memory."""
    source, split = setting.source, setting.stored
    latents, noise, sigma, own, places = drawn(setting, text)
    live, stored = LiveBytes(), AheadOfBlocks._stored

    def inputs() -> dict[str, Any]:
        live.tag([latents, noise, sigma, *own.values()], HOST)
        given = (value.clone() for value in (latents, noise, sigma))  # the device's copies
        there = {name: value.clone() for name, value in own.items()}
        config = source.config("transformer")
        return source.family.noisy_inputs(config, *given, there, setting.guidance, setting.dtype, places)

    def visit(block: int, call: int, state: State, entered: torch.Tensor) -> None:
        live.tag([*state.values()], HOST)
        if block == setting.num_blocks - split.tail:
            live.tag([entered], HOST)

    def kept(ahead: AheadOfBlocks, place: int, returned: Any) -> Any:
        found = stored(ahead, place, returned)
        live.tag([value for value in tree_leaves(found) if isinstance(value, torch.Tensor)], HOST)
        return found

    AheadOfBlocks._stored = kept  # type: ignore[method-assign]
    try:
        with live, read_blocks_are_weights(live), torch.no_grad(), compute(CPU, setting.dtype):
            transformer = StreamedTransformer(source, setting.dtype, CPU)
            live.tag([value for value in transformer.model.parameters() if not value.is_meta], "weights")
            live.tag([value for value in transformer.model.buffers() if not value.is_meta], "weights")
            live.tag(tables(transformer.model), "weights")
            live.reset_peaks()
            live.flops = 0
            for _ in transformer.run([inputs], visit, stop=split.passes, keep=CPU):
                pass
    finally:
        AheadOfBlocks._stored = stored  # type: ignore[method-assign]
    return live


def pictures_encoded(setting: Setting) -> LiveBytes:
    """One group of pictures through the real autoencoder as the run loads it, counted."""
    source, live = setting.source, LiveBytes()
    vae = load_autoencoder(source, "encoder", setting.dtype, CPU)
    latents, noise, *_ = drawn(setting, {"prompt_embeds": torch.zeros(1, 1, 1)})
    pixels = torch.randn(latents.shape[0], 3, *reversed(setting.size)).to(setting.dtype)
    with live:
        live.tag_module(vae)
        live.tag([pixels, noise], "activations")
        live.reset_peaks()
        with torch.no_grad(), compute(CPU, setting.dtype):
            source.family.encode_pixels(vae, pixels, noise).float()
    return live


def text_encoded(setting: Setting, prompts: int = 1) -> LiveBytes:
    """Prompts through the real text encoders, counted; the encoder of the largest peak."""
    source, found = setting.source, []
    stream = setting.config.model.stream_text_encoders
    tokenizers = {part: source.load(part) for part, _ in source.text_parts}
    for _, part in source.text_parts:
        live = LiveBytes()
        streamed = StreamedEncoder(source, part, setting.dtype, CPU) if stream else None
        encoder: nn.Module = source.load(part, setting.dtype) if streamed is None else streamed.model
        all_ids = [
            {name: value.clone() for name, value in source.family.tokenize(tokenizers, [PROMPT], LENGTH).items()}
            for _ in range(prompts)
        ]

        def call(ids: dict[str, torch.Tensor], part: str = part, live: LiveBytes = live, own: Any = encoder) -> Text:
            with _Joined(live), torch.no_grad(), compute(CPU, setting.dtype):
                there = {name: value.clone() for name, value in ids.items()}
                text = source.family.encode_text({part: own}, there)
                live.tag(text.values(), HOST)
            return text

        calls = [partial(call, ids) for ids in all_ids]
        live.tag([value for value in encoder.parameters() if not value.is_meta], "weights")
        live.tag(encoder.buffers(), "weights")
        live.reset_peaks()
        if streamed is None:
            for one in calls:
                one()
        else:
            fill = streamed._fill

            def counted(name: str, fill: Any = fill, live: LiveBytes = live, own: Any = encoder) -> None:
                with live.role("weights"):
                    fill(name)
                live.tag(own.get_submodule(name).parameters(), "weights")

            streamed._fill = counted  # type: ignore[method-assign]
            list(streamed.run(calls))
        found.append(live)
    return max(found, key=lambda live: live.device_peak)


class _Joined(TorchDispatchMode):
    """The counter in another thread."""

    def __init__(self, live: LiveBytes) -> None:
        super().__init__()
        self._live = live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._live.__torch_dispatch__(func, types, args, kwargs)
