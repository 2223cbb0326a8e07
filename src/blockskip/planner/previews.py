"""What previews take: text, denoising by the whole or the streamed model, decoding; the largest of the three counts."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from blockskip.adapters.frozen import FrozenAdapters
from blockskip.families import Text
from blockskip.loading.source import ModelSource
from blockskip.loading.transformer import empty_transformer
from blockskip.method.ahead import SHARED, AheadOfBlocks, Outputs
from blockskip.method.layout import IMAGE, State
from blockskip.method.skipping import run_block, run_head
from blockskip.planner.around import CPU, finish, kernel, latent_shape, new, new_text, reading
from blockskip.planner.counting import HOST, LiveBytes
from blockskip.planner.encoding import Encoder, prompts_encoded
from blockskip.planner.fakes import Different, FakeBlocks
from blockskip.planner.lisa import changed_bytes
from blockskip.planner.parts import empty_autoencoder, empty_part, fake, fake_tensors, stored_dtype
from blockskip.planner.plan import PhasePlan
from blockskip.planner.setting import Setting
from blockskip.preview.denoise import velocity
from blockskip.preview.draw import Drawing


@dataclass(frozen=True)
class Drawn:
    """The pictures of one preview.

    Args:
        height, width: pixels.
        prompts, seeds: how many; a picture for each pair.
        batch: pictures that go through the model together.
        passes: calls of the model for each step: two with classifier-free guidance.
        guidance: the model's guidance input.
        steps: of the sampler.
    """

    height: int
    width: int
    prompts: int
    seeds: int
    batch: int
    passes: int
    guidance: float
    steps: int

    @property
    def pictures(self) -> int:
        """How many."""
        return self.prompts * self.seeds

    @property
    def texts(self) -> list[object]:
        """What tells the text of each call of the model from others', in their order."""
        prompts = [prompt for prompt in range(self.prompts) for _ in range(self.seeds)]
        batches = [tuple(prompts[start : start + self.batch]) for start in range(0, len(prompts), self.batch)]
        return [text for batch in batches for text in (batch, -len(batch))[: self.passes]]

    @property
    def batches(self) -> int:
        """How many."""
        return -(-self.pictures // self.batch)


def drawn(setting: Setting) -> Drawn:
    """What ``preview.draw`` makes of the settings; one picture where there are no prompts.

    Raises:
        UserError: the model cannot draw in that size.
    """
    source, options = setting.source, setting.config.preview
    family, config, call = source.family, source.config("transformer"), source.settings.get("call", {})
    height, width = Drawing((), height=options.height, width=options.width).size(source, "preview.")
    guidance, scale = family.preview_guidance(config, call, options.guidance_scale)
    steps = options.num_inference_steps or call.get("num_inference_steps") or family.defaults.num_inference_steps
    prompts = max(1, len(options.prompts))
    batch = min(options.batch_size, prompts * options.images)
    return Drawn(height, width, prompts, options.images, batch, 2 if scale > 1 else 1, guidance, int(steps))


def preview(setting: Setting, encoders: list[Encoder], text: Text) -> PhasePlan:
    """All pictures of one preview.

    Args:
        encoders, text: of ``encoding.text_encoders``.
    """
    picture = drawn(setting)
    encoding = prompts_encoded(setting, encoders, text, picture.prompts + picture.passes - 1)
    texts = {"encoded text": encoding.host["encoded text"]}
    plans = encoding, denoising(setting, picture, text, texts), decoding(setting, picture)
    largest = max(plans, key=lambda plan: plan.device_peak_bytes)
    most = max(plans, key=lambda plan: plan.host_peak_bytes)
    return dataclasses.replace(
        largest, host_peak_bytes=most.host_peak_bytes, host=most.host,
        disk_bytes=picture.pictures * 3 * picture.height * picture.width,
        read_bytes=sum(plan.read_bytes for plan in plans), flops_forward=sum(plan.flops_forward for plan in plans),
        used=bool(setting.config.preview.prompts),
    )  # fmt: skip


def denoising(setting: Setting, picture: Drawn, text: Text, texts: Mapping[str, int]) -> PhasePlan:
    """All steps of all pictures, which advance together.

    Args:
        texts: the prompts' tensors in host memory, in bytes by name.
    """
    source, stream, live = setting.source, setting.config.preview.stream, LiveBytes()
    shape = (picture.batch, *latent_shape(setting, picture.width, picture.height))
    others, history = len(picture.texts) - 1, remembered(source)
    blocks = FakeBlocks(setting, live) if stream else None
    model = blocks.model if blocks else empty_part(source, "transformer", setting.dtype)
    with fake_tensors(), torch.no_grad(), live:
        lisa = setting.config.train.lisa_blocks  # changed weights are added on their way, one by one
        with live.role(HOST if (stream or lisa) and not setting.pool else "adapters"):
            pairs, changed = _adapter(setting), new((changed_bytes(setting) // 4,))
        adapter = live.now["adapters"] + live.now[HOST]
        fake(model)
        live.tag_module(model)
        weights = live.now["weights"]
        with live.role("other"):
            waiting = [new(shape, setting.dtype) for _ in range(picture.batches)]  # the noise
            waiting += [value for _ in range(others) for value in new_text(text, picture.batch).values()]
            own = new_text(text, picture.batch)
        # latents, what their schedulers remember, and the velocities of calls that went through the whole model before
        count = (1 + history) * picture.batches - 1 + (0 if stream else others)
        waiting += [new(shape, setting.dtype) for _ in range(count)]
        inputs = new(shape, setting.dtype), new((picture.batch,)), own
        live.reset_peaks()
        live.flops = 0
        if blocks:
            _streamed_step(setting, live, blocks, pairs, picture, inputs)
            live.add_to_peaks(blocks.bytes_ahead, "weights")
        else:
            FrozenAdapters.of_pairs(pairs).attach(model)
            with kernel(setting):
                velocity(model, source.family, source.config("transformer"), *inputs, picture.guidance)
        del waiting, changed
    frame = sum(value.numel() for value in model.parameters())
    sizes = [sum(value.numel() for value in block.parameters()) for block in blocks.empty.values()] if blocks else [0]
    waits = {**texts} if setting.pool else {**texts, "adapter": adapter}
    block = reading(setting, "transformer", max(sizes), blocks.largest_tensor) if blocks else {}
    item = stored_dtype(source, "transformer").itemsize
    return finish(
        setting, live, waits | block, waits | reading(setting, "transformer", frame, frame), weights + adapter,
        read_bytes=(frame + picture.steps * sum(sizes)) * item,
        flops_forward=picture.steps * (others + 1) * live.flops,
    )  # fmt: skip


def remembered(source: ModelSource) -> int:
    """Earlier predictions that the sampler keeps, each shaped like the latents; of an unknown sampler 2."""
    try:
        config = json.loads((source.folder / "scheduler" / "scheduler_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 2
    return int(config.get("solver_order", 0))


def decoding(setting: Setting, picture: Drawn) -> PhasePlan:
    """Every picture on its own, by the autoencoder without its encoder; those that are finished wait in host memory."""
    source, live = setting.source, LiveBytes()
    dtype = torch.float32 if setting.dtype == torch.float16 else setting.dtype
    vae = empty_autoencoder(source, "decoder", dtype)
    latents = latent_shape(setting, picture.width, picture.height)
    with fake_tensors():
        pairs = _adapter(setting)
    with fake_tensors(), torch.no_grad(), live:
        fake(vae)
        live.tag_module(vae)
        weights = live.now["weights"]
        with live.role("other"):
            waiting = [new((1, *latents), dtype) for _ in range(picture.pictures)]
        live.reset_peaks()
        with kernel(setting):
            source.family.decode(vae, waiting[0]).float()
        del waiting
    total, size = sum(value.numel() for value in vae.parameters()), 3 * picture.height * picture.width
    adapter = {"adapter": sum(a.nbytes + b.nbytes for a, b, _ in pairs.values()) + changed_bytes(setting)}
    host = adapter | {"pictures": picture.pictures * size + 4 * size}  # bytes, and the values of the one decoded last
    return finish(
        setting, live, host, adapter | reading(setting, "vae", total, total), weights,
        read_bytes=total * stored_dtype(source, "vae").itemsize, flops_forward=picture.pictures * live.flops,
    )  # fmt: skip


def _adapter(setting: Setting) -> dict[str, tuple[torch.Tensor, torch.Tensor, float]]:
    """The adapter as previews read it: A and B of every layer, float32."""
    rank, model = setting.config.lora.rank, empty_transformer(setting.source)
    shapes = {name: model.get_submodule(name).weight.shape for name in setting.targets}  # type: ignore[union-attr]
    return {name: (new((rank, inner)), new((outer, rank)), 1.0) for name, (outer, inner) in shapes.items()}  # type: ignore[misc]


def _streamed_step(
    setting: Setting,
    live: LiveBytes,
    blocks: FakeBlocks,
    pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor, float]],
    picture: Drawn,
    call: tuple[torch.Tensor, torch.Tensor, Text],
) -> None:
    """One call of one sampler step in which blocks visit one after the other, while the other calls' tensors wait."""
    family, config = setting.source.family, setting.source.config("transformer")
    layout, names = family.layout, family.layout.names(blocks.model)
    ahead, outputs, waiting = AheadOfBlocks(blocks.model, layout), Outputs(), list[torch.Tensor]()
    state: State | None = None
    seen: dict[str, int] = {}

    def inputs() -> dict[str, object]:
        return family.forward_inputs(config, *call, picture.guidance)

    for index in range(setting.num_blocks):
        shapes = state and {name: tuple(value.shape) for name, value in state.items()}
        adapted = any(layer.startswith(f"{names[index]}.") for layer in pairs)
        key = repr((min(index, 2), blocks.kind(index), adapted, shapes))
        if key in seen:
            live.flops += seen[key]
            continue
        begun = live.flops
        with kernel(setting), blocks.block(index) as block, _adapted(setting, live, pairs, block, names[index]):
            before: list[torch.Tensor] = []
            if index < 2:  # the other calls went first: what they leave is there when this one comes
                first = Outputs()
                with _ahead(AheadOfBlocks(blocks.model, layout), first, index):
                    left, _ = run_block(blocks.model, layout, index, state, inputs())
                if index and state and len(picture.texts) > 1:
                    before = _kept(first, picture, state[IMAGE], len(picture.texts) - 1)
                    before.append(torch.empty_like(state[IMAGE]))  # what entered the block in the call before
                elif state is None:
                    waiting += [torch.empty_like(value) for _ in picture.texts[1:] for value in left.values()]
                del first, left
                live.flops = begun
            with _ahead(ahead, outputs, index):
                state, _ = run_block(blocks.model, layout, index, state, inputs())
        if index == 1:
            waiting += _kept(outputs, picture, state[IMAGE], len(picture.texts), own=True)
        seen[key] = live.flops - begun
    with kernel(setting), _ahead(ahead, outputs, setting.num_blocks):
        run_head(blocks.model, layout, state or {}, inputs())


@contextlib.contextmanager
def _ahead(ahead: AheadOfBlocks, outputs: Outputs, index: int) -> Iterator[None]:
    """What precedes the blocks is computed in passes 0 and 1, kept, and then given."""
    if index == 0:
        yield
    elif index == 1:
        with Different(), ahead.kept() as kept:
            yield
        outputs += kept
    else:
        with ahead.given(outputs, CPU):
            yield


def _kept(outputs: Outputs, picture: Drawn, image: torch.Tensor, calls: int, own: bool = False) -> list[torch.Tensor]:
    """What the first calls keep of what precedes the blocks: once where it is equal, of texts, batches or all calls.

    Args:
        outputs: of one call.
        image: shaped like the image stream.
        own: without that of the last of these calls.
    """
    known, texts = set[object](), 0
    for text in picture.texts[:calls]:
        if text not in known:
            texts += 1
            known |= {text} if len(known) < SHARED else set()
    found = []
    for module, returned in outputs:
        for leaf in tree_leaves(returned):
            if not isinstance(leaf, torch.Tensor):
                continue
            if next(module.parameters(), None) is None:  # positions
                times = 1
            else:
                times = -(-calls // picture.passes) if leaf.shape == image.shape else texts
            found += [torch.empty_like(leaf) for _ in range(times - own)]
    return found


@contextlib.contextmanager
def _adapted(
    setting: Setting,
    live: LiveBytes,
    pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor, float]],
    block: nn.Module,
    name: str,
) -> Iterator[None]:
    """A block with the adapter attached; a device of its own holds a copy of what acts on this block alone."""
    own = {layer: pair for layer, pair in pairs.items() if layer.startswith(f"{name}.")}
    if not setting.pool:
        with live.role("adapters"):
            own = {layer: (a.clone(), b.clone(), factor) for layer, (a, b, factor) in own.items()}
    FrozenAdapters.of_pairs(own).attach(block, name)
    try:
        yield
    finally:
        for module in block.modules():
            module._forward_hooks.clear()
