"""Trains the transformer and both text encoders on stored latents, as a rectified flow.

    python -m tools.train_flux --build build --minutes 90

noisy = (1 - sigma) * latents + sigma * noise, target = noise - latents, loss = mean squared error; sigma
is logit-normal, shifted by 2 at 128 px.
First all steps are at 64 px; in the last `--large-share` of the time every third step is at 128 px, with fewer.
The last `--decay-share` lowers the learning rate to zero. Goes on from `build/flux.pt` when that exists;
`--start FOLDER` begins from a saved pipeline's weights instead, with fresh optimisers. What is exported is a running
average of the weights. Stop it at any time: at most two minutes are lost.
"""

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from tools.attention import use_explicit_attention
from tools.make_tokenizers import LENGTH
from tools.model import Parts, new_parts, saved_parts
from tools.muon import Muon


class Pool:
    """Stored latents with the token ids of their captions."""

    def __init__(self, stem: Path, parts: Parts, device: torch.device) -> None:
        captions = json.loads(stem.with_suffix(".json").read_text())
        unique = sorted(set(captions))
        number = {caption: index for index, caption in enumerate(unique)}
        self.latents = np.load(stem.with_suffix(".npy"), mmap_mode="r")
        self.row = torch.tensor([number[caption] for caption in captions])
        ids = {"padding": "max_length", "max_length": LENGTH, "truncation": True, "return_tensors": "pt"}
        self.pooled_ids = parts.tokenizer(unique, **ids).input_ids.to(device)
        self.text_ids = parts.tokenizer_2(unique, **ids).input_ids.to(device)
        self.device = device
        rows = columns = self.latents.shape[-1] // 2
        self.shift = (
            rows / 8
        )  # the same signal-to-noise ratio of what is seen at 64 px needs more noise at a larger size
        self.image_places = image_places(rows, columns).to(device)
        self.text_places = torch.zeros(LENGTH, 3, device=device)

    def batch(self, rows: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """Packed latents (batch, tokens, 16) in float32, ids of both tokenizers (batch, 32)."""
        latents = torch.from_numpy(self.latents[np.sort(rows)]).to(self.device).float()
        text = self.row[torch.from_numpy(np.sort(rows))].to(self.device)
        return pack(latents), self.pooled_ids[text], self.text_ids[text]


def pack(latents: Tensor) -> Tensor:
    """(batch, channels, height, width) to (batch, height/2 * width/2, channels * 4), as `FluxPipeline` packs."""
    batch, channels, height, width = latents.shape
    latents = latents.view(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return latents.reshape(batch, height // 2 * (width // 2), channels * 4)


def image_places(rows: int, columns: int) -> Tensor:
    """The token places (0, row, column), shape (rows * columns, 3)."""
    places = torch.zeros(rows, columns, 3)
    places[..., 1] = torch.arange(rows)[:, None]
    places[..., 2] = torch.arange(columns)[None, :]
    return places.view(-1, 3)


def flow_loss(parts: nn.Module, pool: Pool, rows: np.ndarray, generator: torch.Generator | None = None) -> Tensor:
    """Mean squared error of the velocity over one batch, float32."""
    latents, pooled_ids, text_ids = pool.batch(rows)
    noise = torch.randn(latents.shape, generator=generator).to(latents)
    sigma = torch.sigmoid(torch.randn(len(latents), generator=generator)).to(latents)
    sigma = pool.shift * sigma / (1 + (pool.shift - 1) * sigma)
    noisy = torch.lerp(latents, noise, sigma[:, None, None])
    with torch.autocast(latents.device.type, torch.bfloat16):
        velocity = parts(noisy, sigma, pooled_ids, text_ids, pool.image_places, pool.text_places)
    return (velocity.float() - (noise - latents)).pow(2).mean()


def optimizers_for(parts: Parts, learning_rate: float, learning_rate_others: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, AdamW for modulations, ends, embeddings, norms and biases."""
    matrices, others = [], []
    for name, weight in parts.named_parameters():
        inside = "transformer_blocks" in name or ".encoder.layers." in name or ".block." in name
        hidden = weight.ndim == 2 and inside and ".norm" not in name and "relative_attention" not in name
        (matrices if hidden else others).append(weight)
    return [
        Muon(matrices, lr=learning_rate, weight_decay=0.01),
        torch.optim.AdamW(others, lr=learning_rate_others, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]


@torch.no_grad()
def kept_back_loss(parts: nn.Module, pool: Pool, batch: int) -> float:
    """The loss on the last 256 pictures of the pool, with fixed sigmas and noise."""
    generator = torch.Generator().manual_seed(0)
    last = np.arange(len(pool.latents) - 256, len(pool.latents))
    return float(np.mean([flow_loss(parts, pool, rows, generator).item() for rows in np.split(last, 256 // batch)]))


def main() -> None:
    """Trains for the given time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=Path("build"))
    parser.add_argument("--start", type=Path, help="folder of a saved pipeline to begin from, with fresh optimisers")
    parser.add_argument("--minutes", type=float, default=90)
    parser.add_argument("--heads", type=int, default=4, help="the width is 64 times this")
    parser.add_argument("--batch", type=int, default=32, help="pictures of 64 px in a step")
    parser.add_argument("--batch-large", type=int, default=8, help="pictures of 128 px in a step")
    parser.add_argument("--learning-rate", type=float, default=4e-3, help="of the matrices (Muon)")
    parser.add_argument("--learning-rate-others", type=float, default=1e-3, help="of embeddings, modulations, norms")
    parser.add_argument("--large-share", type=float, default=0.5)
    parser.add_argument("--large-every", type=int, default=3, help="in that share, every how many steps")
    parser.add_argument("--decay-share", type=float, default=0.4)
    parser.add_argument("--average", type=float, default=0.999, help="decay of the average of the weights")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(int(time.time()))
    rng = np.random.default_rng()
    device = torch.device(arguments.device)
    if device.type == "cpu":
        use_explicit_attention()

    checkpoint = arguments.build / "flux.pt"
    parts = (saved_parts(arguments.start) if arguments.start else new_parts(arguments.build, arguments.heads)).to(
        device
    )
    average = {name: weight.detach().clone() for name, weight in parts.named_parameters()}
    rates = (arguments.learning_rate, arguments.learning_rate_others)
    optimizers = optimizers_for(parts, *rates)
    step, pictures, earlier = 0, 0, 0.0
    if checkpoint.exists() and not arguments.start:
        saved = torch.load(checkpoint, map_location=device)
        parts.load_state_dict(saved["parts"])
        average, step = saved["average"], saved["step"]
        pictures, earlier = saved.get("pictures", 0), saved.get("seconds", 0.0)
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
    small, large = (arguments.build / f"latents/train{side}" for side in (64, 128))
    pools = {64: Pool(small, parts, device)}
    if arguments.large_share:
        pools[128] = Pool(large, parts, device)
    if arguments.compile:
        parts.transformer.compile_repeated_blocks(dynamic=False)
    print(f"{sum(w.numel() for w in parts.parameters()) / 1e6:.2f}M parameters, from step {step}", flush=True)

    def save() -> None:
        state = {
            "parts": parts.state_dict(),
            "average": average,
            "step": step,
            "pictures": pictures,
            "heads": arguments.heads,
        }
        state["seconds"] = earlier + time.monotonic() - begun
        state["optimizers"] = [optimizer.state_dict() for optimizer in optimizers]
        torch.save(state, checkpoint.with_suffix(".tmp"))
        checkpoint.with_suffix(".tmp").replace(checkpoint)

    begun = saved_at = logged_at = time.monotonic()
    first, losses, weights, averages = step, [], list(parts.parameters()), list(average.values())
    while (share := (time.monotonic() - begun) / (60 * arguments.minutes)) < 1:
        rate = min(1.0, (step - first + 1) / 50) * min(1.0, max(0.01, (1 - share) / max(arguments.decay_share, 1e-6)))
        for optimizer, full in zip(optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * full
        is_large = share > 1 - arguments.large_share and step % arguments.large_every == 0
        pool, count = (pools[128], arguments.batch_large) if is_large else (pools[64], arguments.batch)
        loss = flow_loss(parts, pool, rng.choice(len(pool.latents) - 256, count, replace=False))
        parts.zero_grad(set_to_none=True)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(averages, weights, 1 - min(arguments.average, (step + 1) / (step + 10)))
        step, pictures = step + 1, pictures + count
        if not is_large:
            losses.append(loss.item())
        if step % 100 == 0:
            now = time.monotonic()
            print(
                f"step {step} loss {np.mean(losses):.4f} rate {rate:.2f} {100 / (now - logged_at):.2f} steps/s "
                f"minute {(now - begun) / 60:.1f}",
                flush=True,
            )
            losses, logged_at = [], now
        if step % 500 == 0:
            print(f"  kept-back loss {kept_back_loss(parts, pools[64], arguments.batch):.4f}", flush=True)
        if time.monotonic() - saved_at > 120:
            save()
            saved_at = time.monotonic()
        if not math.isfinite(loss.item()):
            raise SystemExit(
                f"The loss is {loss.item()} at step {step}; go on from {checkpoint} with a lower --learning-rate."
            )
    save()
    print(f"done: step {step}, kept-back loss {kept_back_loss(parts, pools[64], arguments.batch):.4f}")


if __name__ == "__main__":
    main()
