"""Trains the transformer and the text encoders of one small pipeline on stored latents, as a rectified flow.

    python -m tools.train --model flux --build build --minutes 90

noisy = (1 - sigma) * latents + sigma * noise, target = noise - latents, loss = mean squared error; sigma
is logit-normal, shifted by 2 at 128 px. Every third step is at 128 px, with fewer pictures.
The last `--decay-share` of the time lowers the learning rate to zero. Goes on from `build/MODEL/state.pt` when that
exists; else begins from the pipeline in `--start` with fresh optimisers, or from random weights. What is exported is a
running average of the weights. Stop it at any time: at most two minutes are lost.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tools import flux, sana
from tools.attention import use_explicit_attention
from tools.make_tokenizers import make_tokenizers
from tools.model import Parts
from tools.muon import Muon

MODELS = {"flux": flux, "sana": sana}
KEPT_BACK = 256
"""Pictures at the end of a pool that are not trained on."""
SHIFTS = {64: 1.0, 128: 2.0}
"""The same signal-to-noise ratio of what is seen at 64 px needs more noise at a larger size."""


class Pool:
    """Stored latents with the token ids of their captions."""

    def __init__(self, stem: Path, parts: Parts, shift: float, device: torch.device) -> None:
        captions = json.loads(stem.with_suffix(".json").read_text())
        unique = sorted(set(captions))
        number = {caption: index for index, caption in enumerate(unique)}
        self.latents = np.load(stem.with_suffix(".npy"), mmap_mode="r")
        self.row = torch.tensor([number[caption] for caption in captions])
        self.ids = {name: ids.to(device) for name, ids in parts.ids(unique).items()}
        self.shift, self.device = shift, device

    def batch(self, rows: np.ndarray) -> tuple[Tensor, dict[str, Tensor]]:
        """Latents (batch, channels, height, width) in float32, ids (batch, length)."""
        rows = np.sort(rows)
        latents = torch.from_numpy(self.latents[rows]).to(self.device).float()
        text = self.row[torch.from_numpy(rows)].to(self.device)
        return latents, {name: ids[text] for name, ids in self.ids.items()}

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Row numbers of `count` random pictures, none of them kept back."""
        return rng.choice(len(self.latents) - KEPT_BACK, count, replace=False)


def flow_loss(parts: nn.Module, pool: Pool, rows: np.ndarray, generator: torch.Generator | None = None) -> Tensor:
    """Mean squared error of the velocity over one batch, float32."""
    latents, ids = pool.batch(rows)
    noise = torch.randn(latents.shape, generator=generator).to(latents)
    sigma = torch.sigmoid(torch.randn(len(latents), generator=generator)).to(latents)
    sigma = pool.shift * sigma / (1 + (pool.shift - 1) * sigma)
    noisy = torch.lerp(latents, noise, sigma[:, None, None, None])
    with torch.autocast(latents.device.type, torch.bfloat16):
        velocity = parts(noisy, sigma, ids)
    return (velocity.float() - (noise - latents)).pow(2).mean()


@torch.no_grad()
def kept_back_loss(parts: nn.Module, pool: Pool, batch: int) -> float:
    """The loss on the pictures that are kept back, with fixed sigmas and noise."""
    generator = torch.Generator().manual_seed(0)
    last = np.arange(len(pool.latents) - KEPT_BACK, len(pool.latents))
    batches = np.array_split(last, max(1, KEPT_BACK // batch))
    return float(np.mean([flow_loss(parts, pool, rows, generator).item() for rows in batches]))


def optimizers_for(parts: Parts, learning_rate: float, learning_rate_others: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices and 1x1 convolutions inside the blocks; AdamW for modulations, ends, embeddings, norms,
    depthwise convolutions and biases.
    """
    blocks = ("transformer_blocks", ".encoder.layers.", ".block.", "text_encoder.layers.")
    matrices, others = [], []
    for name, weight in parts.named_parameters():
        wide = weight.ndim in (2, 4) and min(weight.flatten(1).shape) > 16
        apart = any(part in name for part in (".norm", "relative_attention", "scale_shift"))
        hidden = wide and not apart and any(part in name for part in blocks)
        (matrices if hidden else others).append(weight)
    return [
        Muon(matrices, lr=learning_rate, weight_decay=0.01),
        torch.optim.AdamW(others, lr=learning_rate_others, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]


def build_parts(
    model: str, build: Path, start: Path | None = None, depth: int | None = None, heads: int | None = None
) -> Parts:
    """The parts to train: of the saved pipeline `start`, or random ones; with the work folder's tokenizers."""
    make_tokenizers(model, build / model, start)
    if start:
        return MODELS[model].saved_parts(start, build / model)
    shape = {name: number for name, number in (("depth", depth), ("heads", heads)) if number}
    return MODELS[model].new_parts(build / model, **shape)


class Training:
    """The state of one training, in memory and in `build/MODEL/state.pt`."""

    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        self.checkpoint = arguments.build / arguments.model / "state.pt"
        saved = torch.load(self.checkpoint, map_location=device) if self.checkpoint.exists() else None
        shape = saved["configuration"] if saved else {"depth": arguments.depth, "heads": arguments.heads}
        start = None if saved else arguments.start
        self.parts = build_parts(arguments.model, arguments.build, start, **shape).to(device)
        self.average = {name: weight.detach().clone() for name, weight in self.parts.named_parameters()}
        self.rates = (arguments.learning_rate, arguments.learning_rate_others)
        self.optimizers = optimizers_for(self.parts, *self.rates)
        self.step, self.pictures, self.seconds = 0, 0, 0.0
        if saved:
            self._load(saved)
        elif start:
            known = json.loads((start / "builtin.json").read_text(encoding="utf-8"))["trained"]
            self.step, self.pictures, self.seconds = known["steps"], known["pictures"], 60.0 * known["minutes"]

    def _load(self, saved: dict[str, Any]) -> None:
        self.parts.load_state_dict(saved["parts"])
        self.average = saved["average"]
        self.step, self.pictures, self.seconds = saved["step"], saved["pictures"], saved["seconds"]
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)

    def save(self) -> None:
        """Writes the state beside the old one, then puts it in its place."""
        state = {
            "parts": self.parts.state_dict(),
            "average": self.average,
            "step": self.step,
            "pictures": self.pictures,
            "seconds": self.seconds,
            "configuration": self.parts.configuration,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        torch.save(state, self.checkpoint.with_suffix(".tmp"))
        self.checkpoint.with_suffix(".tmp").replace(self.checkpoint)

    def update(self, pool: Pool, rows: np.ndarray, rate: float, decay: float) -> float:
        """One optimiser step at `rate` times the learning rates; returns the loss."""
        for optimizer, full in zip(self.optimizers, self.rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * full
        loss = flow_loss(self.parts, pool, rows)
        self.parts.zero_grad(set_to_none=True)
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        decay = min(decay, (self.step + 1) / (self.step + 10))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.values()), list(self.parts.parameters()), 1 - decay)
        self.step, self.pictures = self.step + 1, self.pictures + len(rows)
        value = loss.item()
        if not math.isfinite(value):
            where = f"The loss is {value} at step {self.step}"
            raise SystemExit(f"{where}; go on from {self.checkpoint} with a lower --learning-rate.")
        return value


def train(arguments: argparse.Namespace) -> None:
    """Trains for the given time, printing every 100 steps and saving every two minutes."""
    device = torch.device(arguments.device)
    training = Training(arguments, device)
    parts, rng = training.parts, np.random.default_rng()
    latents = arguments.build / arguments.model / "latents"
    pools = {side: Pool(latents / f"train{side}", parts, SHIFTS[side], device) for side in (64, 128)}
    if arguments.compile:
        lists = ("transformer_blocks", "single_transformer_blocks")
        for block in (block for name in lists for block in getattr(parts.transformer, name, ())):
            block.compile(dynamic=False)
    print(f"{sum(w.numel() for w in parts.parameters()) / 1e6:.2f}M parameters, from step {training.step}", flush=True)

    first, earlier, losses = training.step, training.seconds, []
    begun = saved_at = logged_at = time.monotonic()
    while (share := (time.monotonic() - begun) / (60 * arguments.minutes)) < 1:
        rate = min(1.0, (training.step - first + 1) / 50)
        rate *= min(1.0, max(0.01, (1 - share) / max(arguments.decay_share, 1e-6)))
        side = 128 if training.step % arguments.large_every == 0 else 64
        count = arguments.batch_large if side == 128 else arguments.batch
        loss = training.update(pools[side], pools[side].draw(rng, count), rate, arguments.average)
        losses += [loss] if side == 64 else []
        now = time.monotonic()
        training.seconds = earlier + now - begun
        if training.step % 100 == 0:
            speed = 100 / (now - logged_at)
            where = f"rate {rate:.2f} {speed:.2f} steps/s minute {(now - begun) / 60:.1f}"
            print(f"step {training.step} loss {np.mean(losses):.4f} {where}", flush=True)
            losses, logged_at = [], now
        if training.step % 500 == 0:
            print(f"  kept-back loss {kept_back_loss(parts, pools[64], arguments.batch):.4f}", flush=True)
        if now - saved_at > 120:
            training.save()
            saved_at = now
    training.save()
    print(f"done: step {training.step}, kept-back loss {kept_back_loss(parts, pools[64], arguments.batch):.4f}")


def main() -> None:
    """Reads the options and trains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(MODELS), default="flux")
    parser.add_argument("--build", type=Path, default=Path("build"))
    parser.add_argument("--start", type=Path, help="folder of a saved pipeline to begin from, with fresh optimisers")
    parser.add_argument("--minutes", type=float, default=90)
    parser.add_argument("--depth", type=int, help="blocks (FLUX: of the double kind); default: the model's")
    parser.add_argument("--heads", type=int, help="times 64 (FLUX) or 32 (SANA) is the width; default: the model's")
    parser.add_argument("--batch", type=int, default=32, help="pictures of 64 px in a step")
    parser.add_argument("--batch-large", type=int, default=8, help="pictures of 128 px in a step")
    parser.add_argument("--large-every", type=int, default=3, help="every how many steps one is at 128 px")
    parser.add_argument("--learning-rate", type=float, default=4e-3, help="of the matrices (Muon)")
    parser.add_argument("--learning-rate-others", type=float, default=1e-3, help="of embeddings, modulations, norms")
    parser.add_argument("--decay-share", type=float, default=0.4)
    parser.add_argument("--average", type=float, default=0.999, help="decay of the average of the weights")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(int(time.time()))
    if torch.device(arguments.device).type == "cpu":
        use_explicit_attention()
    train(arguments)


if __name__ == "__main__":
    main()
