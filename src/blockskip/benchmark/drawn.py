"""What the model gives with an adapter: pictures of prompts, and the held-out loss. Kept as files, drawn once."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image

from blockskip.benchmark.model import Model
from blockskip.benchmark.subjects import Subject
from blockskip.encoding.text import encode_prompts
from blockskip.families import Text
from blockskip.loading.source import ModelSource
from blockskip.loading.transformer import Adapters
from blockskip.preview.draw import decode, draw
from blockskip.progress import say
from blockskip.run.fixed import FixedSamples, fixed_samples, heldout_loss
from blockskip.run.previews import open_pictures, save_png
from blockskip.store.files import write_atomically


class Drawer:
    """Draws with a model; every prompt is encoded once.

    Args:
        prompts: that will be drawn; all are encoded with the first.
    """

    def __init__(self, model: Model, prompts: Sequence[str]) -> None:
        self.model, self._expected = model, tuple(prompts)
        self._texts: dict[str, Text] = {}

    def pictures(
        self, folder: Path, prompts: Sequence[str], count: int, adapters: Adapters, what: str
    ) -> list[list[Image.Image]]:
        """Pictures by prompt and seed; the seeds are 0, 1, ... and the same for every adapter.

        Args:
            folder: where they are kept, ``00-0.png``; what lies there whole is not drawn again.
            count: of each prompt.
            adapters: of the base, and what was learnt (``Model.adapters``).
            what: is told while they are drawn.
        """
        files = [[folder / f"{row:02d}-{number}.png" for number in range(count)] for row in range(len(prompts))]
        if not all(path.is_file() for row in files for path in row):
            say(f"drawing {what}: {len(prompts)} prompts, {count} each")
            model, drawing = self.model, self.model.drawing(tuple(prompts), tuple(range(count)))
            rows = draw(model.source, drawing, self._encode, model.dtype, model.device, adapters)
            folder.mkdir(parents=True, exist_ok=True)
            for row, line in zip(files, rows, strict=True):
                for path, image in zip(row, line, strict=True):
                    save_png(path, image)
        return [open_pictures(row) for row in files]

    def _encode(
        self, source: ModelSource, prompts: Sequence[str], length: int, dtype: torch.dtype, device: torch.device
    ) -> list[Text]:
        if any(prompt not in self._texts for prompt in prompts):
            new = [text for text in dict.fromkeys([*prompts, *self._expected]) if text not in self._texts]
            self._texts |= dict(zip(new, encode_prompts(source, new, length, dtype, device), strict=True))
        return [self._texts[prompt] for prompt in prompts]


@dataclass
class Heldout:
    """The kept-back pictures of a subject as the model sees them, at each size of ``Model.loss_sizes``."""

    model: Model
    subject: Subject

    def __post_init__(self) -> None:
        self._samples: dict[tuple[int, int], FixedSamples] = {}

    def losses(self, adapters: Adapters, path: Path) -> dict[str, list[float]]:
        """Flow-matching loss of the whole model at nine noise levels, by size (``128x128``).

        Args:
            path: where it is kept; what lies there is not computed again.
        """
        if path.is_file():
            kept: dict[str, list[float]] = json.loads(path.read_text(encoding="utf-8"))
            return kept
        guidance = self.model.request.training_of().get("train.guidance_scale")
        if guidance is None:
            guidance = self.model.source.family.defaults.guidance_scale
        found = {}
        for size in self.model.loss_sizes:
            found[named(size)] = heldout_loss(
                self.model.source, adapters, self._at(size), self.model.dtype, self.model.device, guidance=guidance
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda temporary: temporary.write_text(json.dumps(found), encoding="utf-8"))
        return found

    def drawable(self, folder: Path) -> list[Image.Image]:
        """The pictures as the model could at best draw them (``through_autoencoder``)."""
        files = [Path(path) for path in self.subject.heldout]
        return through_autoencoder(self.model, folder, len(files), lambda: self._at(self.model.size))

    def _at(self, size: tuple[int, int]) -> FixedSamples:
        if size not in self._samples:
            files = [Path(path) for path in self.subject.heldout]
            self._samples[size] = encoded(self.model, files, self.subject.caption, size)
        return self._samples[size]


def encoded(model: Model, files: Sequence[Path], caption: str, size: tuple[int, int]) -> FixedSamples:
    """Pictures with one caption as latents, with their fixed noise."""
    return fixed_samples(
        model.source, files, [caption] * len(files), size, model.dtype, model.device, text_length=model.text_length
    )


def through_autoencoder(
    model: Model, folder: Path, count: int, samples: Callable[[], FixedSamples]
) -> list[Image.Image]:
    """Real pictures as the model could at best draw them: at the drawn size, encoded and decoded again.

    Compared with sharp photographs every drawn picture would be judged for the autoencoder's blur.

    Args:
        folder: where they are kept.
        count: how many there are.
        samples: gives them as latents of the drawn size, where they are not kept yet.
    """
    paths = [folder / f"{number:02d}.png" for number in range(count)]
    if not all(path.is_file() for path in paths):
        latents = samples().latents
        images = decode(model.source, [one[None] for one in latents.to(model.device)], model.dtype, model.device)
        folder.mkdir(parents=True, exist_ok=True)
        for path, image in zip(paths, images, strict=True):
            save_png(path, image)
    return open_pictures(paths)


def named(size: tuple[int, int]) -> str:
    """``128x128``."""
    return f"{size[0]}x{size[1]}"
