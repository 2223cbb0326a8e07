"""The settings of a run: typed classes that are at once TOML file, command line and Python arguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


def option(default: Any, help: str, **bounds: float) -> Any:
    """A dataclass field with a help text and optional bounds (``low``, ``high``: inclusive; ``above``: exclusive)."""
    return field(default=default, metadata={"help": help, **bounds})


@dataclass(frozen=True)
class ModelConfig:
    """[model]: the base."""

    path: str = option("builtin", 'diffusers pipeline: "builtin" (FLUX), "builtin-sana", a folder, or a hub id')
    revision: str | None = option(None, "branch, tag or commit of a hub id")
    transformer: str | None = option(
        None, "file with the transformer's weights, in diffusers' or the original layout; all else comes from the model"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "of the frozen base; auto: float32 on a CPU"
    )
    quantization: Literal["none", "int8", "nf4"] = option(
        "none", "of the linear layers of the trained and kept blocks; precompute and previews use the unquantised base"
    )
    base_adapters: tuple[str, ...] = option((), "LoRA files that belong to the frozen base and are not in the output")
    stream_text_encoders: bool = option(False, "hold one layer of a text encoder in memory at a time")
    read_ahead: bool = option(
        True, "copy the next of the blocks that visit a GPU one by one while one computes: two are in its memory"
    )


@dataclass(frozen=True)
class DataConfig:
    """[data]: the pictures and their captions."""

    images: str = option("", "folder of 4-6 pictures; a same-name .txt file is a picture's caption")
    prompt: str | None = option(None, 'caption of every picture without a file of its own: "a photo of sks dog"')
    resolution: int | None = option(
        None, "pixels the transformer trains on (s_min); default: half the full resolution", low=8
    )
    full_resolution: int | None = option(
        None, "pixels the pictures are scaled to (s_max); default: the family's", low=8
    )
    flip: bool = option(False, "mirror half of the samples")
    caption_dropout: float = option(0.0, "share of samples trained with the empty caption", low=0, high=1)
    class_images: str | None = option(None, "folder of class pictures (prior preservation)")
    class_prompt: str | None = option(None, "caption of the class pictures")
    class_weight: float = option(1.0, "weight of the class pictures in the loss", low=0)
    text_length: int | None = option(None, "text tokens; default: the family's", low=1)


@dataclass(frozen=True)
class PatchesConfig:
    """[patches]: dynamic patch sampling (Eq. 1)."""

    direction: Literal["low-to-high", "high-to-low", "random", "fixed"] = option(
        "low-to-high", "how the side follows sigma; fixed: always the full resolution (resize only)"
    )
    shape: Literal["square", "picture"] = option("square", "square (the paper), or the picture's aspect at equal area")
    positions: Literal["patch", "picture"] = option(
        "patch", "of a patch's tokens: those of a small picture of its own, or their place in the whole one"
    )


@dataclass(frozen=True)
class SkipConfig:
    """[skip]: which blocks leave memory, and what stands in for them."""

    ratio: float = option(0.5, "share of the blocks that is skipped", low=0, high=0.99)
    front: int | None = option(None, "blocks skipped at the front (with skip.tail, instead of the ratio)", low=0)
    tail: int | None = option(None, "blocks skipped at the tail", low=0)
    selection: str | None = option(
        None, "result of `blockskip select`, which chooses front and tail for the ratio; default: a measured split"
    )
    front_mode: Literal["features", "keep"] = option(
        "features", "the front: replaced by its stored features, or kept in memory, frozen, and run"
    )
    tail_mode: Literal["residual", "stream", "keep"] = option(
        "residual", "the tail: replaced by skip.rule, or run exactly, with one block in memory at a time or (keep) all"
    )
    middle: int = option(
        0, "blocks skipped in the middle instead, replaced by skip.rule, with trained ones on both sides", low=0
    )
    middle_start: int | None = option(None, "number of the first of them, from 0; default: placed centrally", low=1)
    rule: str = option("residual", 'what stands in for a span: "residual", "none", or "file.py:Class"')


@dataclass(frozen=True)
class SigmaConfig:
    """[sigma]: the noise levels that are trained."""

    distribution: Literal["uniform", "logit-normal"] | None = option(None, "default: the family's")
    shift: float | None = option(None, "default: the family's", above=0)
    mean: float = option(0.0, "of the logit-normal distribution")
    std: float = option(1.0, "of the logit-normal distribution", above=0)


@dataclass(frozen=True)
class LoraConfig:
    """[lora]: the adapter."""

    rank: int = option(16, "rank of every LoRA pair", low=1)
    lora_alpha: float | None = option(None, "scale is lora_alpha / rank; default: the rank", above=0)
    dropout: float = option(0.0, "dropout on the input of LoRA", low=0, high=0.99)
    freeze_a: bool = option(False, "LoRA-FA: A stays at its random start, and B alone is trained")
    targets: tuple[str, ...] = option(
        (), "layer names inside a block (to_q, attn.to_k, ff.net.2); default: the family's"
    )


@dataclass(frozen=True)
class TrainConfig:
    """[train]: the optimisation."""

    steps: int = option(500, "optimiser steps", low=1)
    batch_size: int = option(1, "samples that go through a block together", low=1)
    gradient_accumulation_steps: int = option(4, "micro-batches of one optimiser step", low=1)
    optimizer: Literal["adamw", "adamw8bit"] = option(
        "adamw", "adamw8bit: the moments in 8 bits, 2 bytes a trained parameter instead of 8; CUDA and CPUs"
    )
    learning_rate: float = option(1e-4, "of AdamW", above=0)
    lr_scheduler: Literal["constant", "cosine", "linear"] = option("constant", "shape after the warm-up")
    lr_warmup_steps: int = option(0, "steps of linear warm-up", low=0)
    weight_decay: float = option(0.01, "of AdamW", low=0)
    max_grad_norm: float = option(1.0, "gradients are clipped to this norm; 0: not at all", low=0)
    gradient_checkpointing: bool = option(False, "recompute block activations in the backward pass")
    stream_middle: bool = option(False, "keep only one of the trained blocks' base weights in memory at a time")
    lisa_blocks: int = option(
        0, "LISA instead of LoRA: how many random blocks are trained at a time, with their full weights", low=0
    )
    lisa_period: int = option(50, "LISA: optimiser steps after which other blocks are drawn", low=1)
    guidance_scale: float | None = option(None, "guidance input of distilled models; default: the family's")
    seed: int = option(0, "one seed for everything that is drawn", low=0)
    device: str = option("auto", "auto, cpu, cuda, mps")
    checkpoint_every: int = option(100, "optimiser steps between checkpoints; 0: only at the end", low=0)
    checkpoints_total_limit: int = option(2, "older checkpoints are removed; 0: keep all", low=0)


@dataclass(frozen=True)
class FeaturesConfig:
    """[features]: precomputed features and where they lie."""

    pool: int = option(0, "distinct groups that are stored and cycled; 0: one for every micro-step", low=0)
    window: str = option("1GiB", "states of the groups that go through the blocks together while precomputing")
    window_on: Literal["memory", "disk"] = option(
        "memory", "where these states wait; on disk, a large window needs no more memory than a small one"
    )
    disk: str | None = option(
        None, "largest size of the feature store; a larger run alternates precompute and training, removing its groups"
    )
    cache: str | None = option(None, "folder of encoded text and pixels, and features; default: <output>/cache")
    keep: bool = option(False, "keep the cache after the run")
    dtype: Literal["auto", "int8"] = option(
        "auto",
        "of the stored ones; auto: as the blocks returned them; int8: half of bfloat16's disk space, but each value "
        "moves by up to a 254th of its token's largest one, and the front is no longer exact",
    )


@dataclass(frozen=True)
class PreviewConfig:
    """[preview]: pictures drawn with the adapter."""

    prompts: tuple[str, ...] = option((), "drawn at the end of the run, or see preview.every")
    every: int = option(0, "optimiser steps between previews, drawn after a checkpoint; 0: only at the end", low=0)
    seed: int = option(0, "noise seed of the first picture of each prompt", low=0)
    images: int = option(1, "pictures of each prompt", low=1)
    num_inference_steps: int | None = option(None, "sampler steps; default: the model's", low=1)
    guidance_scale: float | None = option(None, "default: the model's")
    height: int | None = option(None, "pixels; default: the model's", low=8)
    width: int | None = option(None, "pixels; default: the model's", low=8)
    batch_size: int = option(1, "pictures that go through the transformer together", low=1)
    stream: bool = option(False, "load one block at a time instead of the whole transformer")


@dataclass(frozen=True)
class MemoryConfig:
    """[memory]: what a run may take; settings that are left open are chosen so that every phase fits."""

    device: str | None = option(None, "device memory, 8GiB for example; on a CPU all memory of the run")
    host: str | None = option(None, "host memory above the process after its imports")
    disk: str | None = option(None, "disk space for what the run writes")
    return_freed: bool | None = option(
        None,
        "give host memory back as soon as it is freed (glibc), up to half as much time again on a CPU; "
        "default: with a budget, and with a GPU",
    )


@dataclass(frozen=True)
class Config:
    """Everything a run is made from. Field by field the resolved form is written to ``<output>/config.toml``."""

    output: str = option("", "folder that the run writes")
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    patches: PatchesConfig = PatchesConfig()
    skip: SkipConfig = SkipConfig()
    sigma: SigmaConfig = SigmaConfig()
    lora: LoraConfig = LoraConfig()
    train: TrainConfig = TrainConfig()
    features: FeaturesConfig = FeaturesConfig()
    preview: PreviewConfig = PreviewConfig()
    memory: MemoryConfig = MemoryConfig()
