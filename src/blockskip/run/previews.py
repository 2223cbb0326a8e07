"""The previews of a run: drawn with its adapter, kept as PNG files, and not drawn twice."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from blockskip.adapters.frozen import FrozenAdapters
from blockskip.config import PreviewConfig
from blockskip.encoding.text import encode_prompts
from blockskip.keys import file_sha256, key
from blockskip.measure import Meter
from blockskip.preview.draw import draw
from blockskip.run.large import preview_drawing
from blockskip.run.prepare import Prepared
from blockskip.store.files import write_atomically


@dataclass(frozen=True)
class PreviewArgument:
    """Everything that a run's previews depend on."""

    preview: PreviewConfig
    adapters: tuple[str, ...]
    model: str
    text_length: int
    dtype: str


def previews(prepared: Prepared, lora: Path, step: int, meter: Meter) -> list[list[Image.Image]]:
    """Pictures by prompt and seed; ``samples/step-000500-<prompt>-<number>.png``.

    Args:
        lora: the adapter file to draw with.

    Raises:
        RunError: the autoencoder gave values that are not finite.
    """
    preview, config = prepared.config.preview, prepared.config
    folder = prepared.output / "samples"
    files = [
        [folder / f"step-{step:06d}-{row:02d}-{number}.png" for number in range(preview.images)]
        for row in range(len(preview.prompts))
    ]
    adapters = (*prepared.adapters.identity(), file_sha256(lora))
    model = " ".join(filter(None, (config.model.path, config.model.transformer)))
    argument = PreviewArgument(preview, adapters, model, prepared.text_length, str(prepared.dtype))
    note, name = folder / f"step-{step:06d}.json", key("preview", argument)
    if _noted(note) == name:
        try:
            return [[_open(path) for path in row] for row in files]
        except OSError:
            pass  # a picture was removed: draw again
    drawing = preview_drawing(config, prepared.text_length)
    with meter.phase("preview"):
        both = FrozenAdapters([*config.model.base_adapters, str(lora)])
        encode = functools.partial(encode_prompts, stream=config.model.stream_text_encoders)
        images = draw(prepared.source, drawing, encode, prepared.dtype, prepared.device, both)
    folder.mkdir(exist_ok=True)
    for row, line in zip(files, images, strict=True):
        for path, image in zip(row, line, strict=True):
            save_png(path, image)
    document = json.dumps({"key": name, "prompts": list(preview.prompts)}, indent=1)
    write_atomically(note, lambda path: path.write_text(document, encoding="utf-8"))
    return images


def save_png(path: Path, image: Image.Image) -> None:
    """Write a picture atomically."""
    write_atomically(path, lambda temporary: image.save(temporary, format="PNG"))


def open_pictures(paths: Sequence[Path]) -> list[Image.Image]:
    """The pictures of files, in memory."""
    return [_open(path) for path in paths]


def _open(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGB")


def _noted(note: Path) -> str:
    try:
        return str(json.loads(note.read_text(encoding="utf-8"))["key"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
