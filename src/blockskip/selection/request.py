"""What ``blockskip select`` is asked for, checked before a model is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from blockskip.errors import UserError
from blockskip.method.split import skipped_count

Probe = Literal["pictures", "velocity"]
PROBES: tuple[str, ...] = ("pictures", "velocity")


_PLAIN = "the adapters are plain LoRA of the model itself, in the selection's own folder"
#: Settings of a training that a selection has its own options for, or that would make another model of its own.
OWN = dict.fromkeys(
    ("skip.front", "skip.tail", "skip.ratio", "skip.selection", "skip.middle", "train.lisa_blocks",
     "model.base_adapters", "output"), _PLAIN,
) | {
    "model.path": "--model says it", "model.revision": "--revision says it", "model.dtype": "--dtype says it",
    "model.transformer": "--model.transformer says it", "train.device": "--device says it",
    "data.images": "--images says it", "data.prompt": "--prompt says it",
}  # fmt: skip


@dataclass(frozen=True)
class Request:
    """Everything that a selection depends on, and where it goes.

    Args:
        model, revision: as of a run.
        loras: files or folders of adapters of the model; without any, they are trained.
        images: a folder of pictures for each subject to train on; without any, a built-in model takes its own.
        caption: of every folder in ``images``; ``{}`` stands for the folder's name.
        count: how many subjects are taken, of those that there are.
        prompts: drawn with every adapter; ``{}`` stands for its caption. Without any, a few of our own.
        ratios: shares of the blocks to skip; a split is chosen for each.
        probes: ``pictures`` (Eq. 2) and ``velocity`` (no sampling); the splits come from the first one.
        encoder: of the pictures' distances, see ``evaluation.encoders.open_encoder``.
        images_per_prompt: noise seeds, from ``seed`` on.
        steps, guidance_scale, height, width: of the sampler; None takes the model's own.
        window: blocks in the sliding window; None takes a quarter of all (the paper: 14 of 57), 0 has none.
        training: settings of the adapters' training, by dotted key.
        output: the result file; what belongs to it lies in the folder of the same name without ``.json``.
        batch_size, stream, device, dtype: how it is computed; the first two change no choice.
        transformer: as of a run.
    """

    model: str = "builtin"
    revision: str | None = None
    loras: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    caption: str = "a photo of sks {}"
    count: int = 4
    prompts: tuple[str, ...] = ()
    ratios: tuple[float, ...] = (0.3, 0.4, 0.5)
    probes: tuple[Probe, ...] = ("pictures", "velocity")
    encoder: str = "efficientnet"
    images_per_prompt: int = 2
    seed: int = 0
    steps: int | None = None
    guidance_scale: float | None = None
    height: int | None = None
    width: int | None = None
    window: int | None = None
    training: Mapping[str, Any] = field(default_factory=dict)
    output: Path = Path("selection.json")
    batch_size: int = 16
    stream: bool = False
    device: str = "auto"
    dtype: str = "auto"
    transformer: str | None = None

    @property
    def folder(self) -> Path:
        """Of everything that is not the result file."""
        return self.output.with_suffix("")

    def skipped(self, num_blocks: int) -> dict[float, int]:
        """k = n + m for every ratio.

        Raises:
            UserError: a ratio leaves nothing to skip or to train.
        """
        found = {}
        for ratio in self.ratios:
            try:
                found[ratio] = skipped_count(ratio, num_blocks)
            except ValueError as error:
                raise UserError(f"--ratios: {error}.") from None
            if not found[ratio]:
                raise UserError(f"--ratios: {ratio} of {num_blocks} blocks is none; give a larger share.")
        return found

    def width_of_window(self, num_blocks: int) -> int:
        """Blocks in the sliding window.

        Raises:
            UserError: more than there are.
        """
        width = max(1, round(num_blocks / 4)) if self.window is None else self.window
        if not 0 <= width <= num_blocks:
            raise UserError(f"--window = {width} does not fit the model, which has {num_blocks} blocks.")
        return width

    def check(self) -> list[str]:
        """Sentences about what cannot be used, whatever the model."""
        found = []
        if self.output.suffix != ".json":
            found.append(
                f'--output "{self.output}" must end in .json; give the file to write, "selection.json" for example.'
            )
        for name, value, least in (
            ("count", self.count, 1), ("images-per-prompt", self.images_per_prompt, 1),
            ("batch-size", self.batch_size, 1), ("num-inference-steps", self.steps, 1), ("seed", self.seed, 0),
            ("height", self.height, 1), ("width", self.width, 1), ("window", self.window, 0),
        ):  # fmt: skip
            if value is not None and value < least:
                found.append(f"--{name} must be at least {least}, not {value}.")
        if not self.ratios:
            found.append("--ratios is empty; give shares between 0 and 1, 0.3,0.4,0.5 for example.")
        found += [f"--ratios: {ratio} is not between 0 and 1." for ratio in self.ratios if not 0 < ratio < 1]
        scale = self.guidance_scale
        if scale is not None and not 0 <= scale < math.inf:
            found.append(f"--guidance-scale must be a number from 0 on, not {scale}.")
        if not all(prompt.strip() for prompt in self.prompts):
            found.append('--prompts has an empty one; give what is to be drawn, "{} in the snow" for example.')
        if not self.caption.strip():
            found.append('--prompt is empty; give the caption of the pictures, "a photo of sks {}" for example.')
        if not self.probes or not set(self.probes) <= set(PROBES):
            found.append(f"--probe must be one or both of {', '.join(PROBES)}.")
        if self.loras and self.images:
            found.append("--loras are tuned already and --images are to be tuned on; give one of the two.")
        if self.output.is_dir():
            found.append(f'--output "{self.output}" is a folder; give the file to write.')
        for name in sorted(self.training):
            if name in OWN:
                found.append(f"{name} cannot be set here: {OWN[name]}.")
        return found
