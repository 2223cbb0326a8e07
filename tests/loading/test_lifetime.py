"""What is alive during a phase and after it: one part of the pipeline at a time, and nothing of it afterwards."""

import gc
import importlib
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope
from torch import nn

from blockskip.data.pictures import read_pictures
from blockskip.data.schedule import make_schedule
from blockskip.encoding.pixels import store_pixels
from blockskip.encoding.text import encode_prompts
from blockskip.features.precompute import Input, precompute
from blockskip.loading.source import ModelSource
from blockskip.loading.transformer import StreamedTransformer, empty_transformer, load_transformer
from blockskip.method.skipping import ConstantResidual, SkippedModel
from blockskip.method.split import Split
from blockskip.preview.draw import Drawing, draw
from blockskip.settings import from_flat
from blockskip.store.groups import GroupStore
from tests.families.groups import CPU, adapt, group
from tests.tiny_families import TINY

#: What diffusers itself keeps for ever, in a cache of the positions it has made; it has no parameters.
CACHED = (QwenEmbedRope,)


def part_classes(source: ModelSource) -> dict[str, type[nn.Module]]:
    """The classes of the pipeline's text encoders, autoencoder and transformer, by part."""
    index = json.loads((source.folder / "model_index.json").read_text(encoding="utf-8"))
    parts = [*(encoder for _, encoder in source.text_parts), "vae", "transformer"]
    return {part: getattr(importlib.import_module(index[part][0]), index[part][1]) for part in parts}


def block_classes(source: ModelSource) -> tuple[type[nn.Module], ...]:
    """The classes of the transformer's blocks."""
    return tuple({type(block) for block in source.family.layout.blocks(empty_transformer(source))})


class Alive:
    """Weak references to every module made (or copied) since, and which parts were alive when a part was made."""

    def __init__(self, source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
        parts = self.parts = tuple(part_classes(source).values())
        self.blocks = block_classes(source)
        self.modules: list[weakref.ref[nn.Module]] = []
        self.order: list[tuple[str, list[str]]] = []
        begin, restore = nn.Module.__init__, nn.Module.__setstate__

        def init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            if isinstance(module, parts):
                self.order.append((type(module).__name__, [type(part).__name__ for part in self.now(parts)]))
            self.modules.append(weakref.ref(module))
            begin(module, *args, **kwargs)

        def setstate(module: nn.Module, state: Any) -> None:
            self.modules.append(weakref.ref(module))
            restore(module, state)

        monkeypatch.setattr(nn.Module, "__init__", init)
        monkeypatch.setattr(nn.Module, "__setstate__", setstate)

    def now(self, kinds: type | tuple[type, ...] = nn.Module) -> list[nn.Module]:
        """The modules that are alive once the garbage is collected."""
        gc.collect()
        return [module for ref in self.modules if isinstance(module := ref(), kinds)]


@pytest.fixture
def alive(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> Alive:
    found = Alive(source, monkeypatch)
    gc.freeze()  # what is there already is looked at no more
    return found


def tensors() -> dict[int, torch.Tensor]:
    """Every tensor that is alive and was made since the garbage collector was frozen, by identity."""
    gc.collect()
    return {id(value): value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_no_parameter_of_a_skipped_block_is_alive(source: ModelSource, alive: Alive, dtype: torch.dtype) -> None:
    layout, split = source.family.layout, Split(2, 2)
    count = layout.count(empty_transformer(source))
    model = load_transformer(source, split.skipped(count), dtype, CPU)
    kept = [layout.blocks(model)[index] for index in split.middle(count)]
    assert len([ref for ref in alive.modules if ref() is None or isinstance(ref(), alive.blocks)]) >= count
    assert {id(block) for block in alive.now(alive.blocks)} == {id(block) for block in kept}

    names = layout.names(model)
    skipped = tuple(f"{names[index]}." for index in split.skipped(count))
    assert not [name for name in model.state_dict() if name.startswith(skipped)]
    own = {id(value): value for value in (*model.parameters(), *model.buffers())}
    assert {value.device.type for value in own.values()} == {"cpu"}
    assert {value.dtype for value in model.parameters()} == {dtype}
    found = tensors()
    assert own.keys() <= found.keys()
    memory = {value.untyped_storage().data_ptr() for value in own.values()}
    others = [value for value in found.values() if value.untyped_storage().data_ptr() not in memory]
    assert [value.shape for value in others if value.is_floating_point()] == []


def test_nor_while_a_training_step_runs(source: ModelSource, alive: Alive) -> None:
    count, split = source.family.layout.count(empty_transformer(source)), Split(1, 2)
    skipped = SkippedModel(
        load_transformer(source, split.skipped(count), torch.float32, CPU), source.family.layout, split,
        ConstantResidual(),
    )  # fmt: skip
    adapt(source, skipped.model, split.middle(count))
    assert len(alive.now(alive.blocks)) == count - 3


def _encode(source: ModelSource, _: Path, __: Path) -> None:
    encode_prompts(source, ["a", "b"], 8, torch.float32, CPU)


def _encode_streamed(source: ModelSource, _: Path, __: Path) -> None:
    encode_prompts(source, ["a", "b"], 8, torch.float32, CPU, stream=True)


def _pixels(source: ModelSource, photos: Path, folder: Path) -> None:
    pictures = read_pictures(str(photos), "a photo", resolution=64, full_resolution=128)
    config = from_flat({"train.steps": 2})
    sizes = {"resolution": 64, "full_resolution": 128, "stride": source.pixel_stride}
    schedule = make_schedule(config, pictures, **sizes, distribution="uniform", shift=1.0)
    store_pixels(source, schedule, schedule.groups[:2], torch.float32, CPU, GroupStore(folder))


def _precompute(source: ModelSource, _: Path, folder: Path) -> None:
    batch = group(source)
    precompute(
        source, Split(2, 1), ConstantResidual(), ["1", "2"],
        lambda index: Input(str(index + 1), batch.latents, batch.noise, batch.sigma, batch.text),
        GroupStore(folder), window_bytes=1 << 30, dtype=torch.float32, device=CPU, guidance=1.0,
    )  # fmt: skip


def _draw(source: ModelSource, _: Path, __: Path) -> None:
    drawing = Drawing(("a",), height=64, width=64, steps=2, text_length=8)
    draw(source, drawing, encode_prompts, torch.float32, CPU)


def _draw_streamed(source: ModelSource, _: Path, __: Path) -> None:
    drawing = Drawing(("a",), height=64, width=64, steps=2, text_length=8, stream=True)
    draw(source, drawing, encode_prompts, torch.float32, CPU)


TEXT, VAE, DIT = "text_encoder", "vae", "transformer"


@pytest.mark.parametrize("source", TINY, indirect=True)
@pytest.mark.parametrize(
    ("phase", "parts"),
    [
        (_encode, (TEXT,)),
        (_encode_streamed, (TEXT,)),
        (_pixels, (VAE,)),
        (_precompute, (DIT,)),
        (_draw, (TEXT, DIT, VAE)),
        (_draw_streamed, (TEXT, DIT, VAE)),
    ],
)
def test_a_phase_holds_one_part_at_a_time_and_leaves_none(
    source: ModelSource, photos: Path, tmp_path: Path, alive: Alive, phase: Callable[..., None], parts: tuple[str, ...]
) -> None:
    phase(source, photos, tmp_path)
    made = [name for name, _ in alive.order]
    classes = part_classes(source)
    assert made == [cls.__name__ for kind in parts for part, cls in classes.items() if part.startswith(kind)]
    assert [beside for _, beside in alive.order] == [[]] * len(made), alive.order
    assert len(alive.modules) > 10
    assert [module for module in alive.now() if not isinstance(module, CACHED)] == []


def test_one_block_at_a_time_is_alive_in_a_streamed_pass(source: ModelSource, alive: Alive) -> None:
    streamed = StreamedTransformer(source, torch.float32, CPU)

    def filled() -> list[nn.Module]:
        return [block for block in alive.now(alive.blocks) if not next(block.parameters()).is_meta]

    for index in range(streamed.num_blocks):
        with streamed.block(index) as block:
            assert [id(one) for one in filled()] == [id(block)]
        del block
        assert filled() == []
