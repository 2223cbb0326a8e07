"""Trains a small autoencoder over composites of all sprites, seven batches at 64 px for one at 128 px.

    python -m tools.train_vae --model flux --build build --minutes 15

`flux`: `AutoencoderKL` with three levels (factor 4) and four latent channels;
loss = L1 + 0.5 * L1 of gradients + 0.3 * perceptual distance + 1e-5 * KL.
`sana`: the deep-compression `AutoencoderDC` with four levels (factor 8) and 16 latent channels. It is deterministic, so
its latents get noise of deviation 0.1 in training and 1e-3 * their mean square takes the place of the KL term.
Runs on from `build/MODEL/vae.pt` when that exists. The last third of the time lowers the learning rate to zero.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderDC, AutoencoderKL
from torch import Tensor
from torch.nn import functional

from tools.autoencoders import Autoencoder, batch_of, encoded, new_autoencoder
from tools.muon import Muon
from tools.perceptual import PerceptualDistance


def gradients(pictures: Tensor) -> tuple[Tensor, Tensor]:
    """Differences of neighbouring pixels, downwards and to the right."""
    return pictures[..., 1:, :] - pictures[..., :-1, :], pictures[..., 1:] - pictures[..., :-1]


def sampled(vae: Autoencoder, pictures: Tensor) -> tuple[Tensor, Tensor]:
    """Latents with the noise they have in training, and the term that keeps them small."""
    output = vae.encode(pictures)
    if isinstance(vae, AutoencoderDC):
        latents = output.latent
        return latents + 0.1 * torch.randn_like(latents), 1e-3 * latents.float().pow(2).mean()
    return output.latent_dist.sample(), 1e-5 * output.latent_dist.kl().mean()


def vae_loss(vae: Autoencoder, perceptual: PerceptualDistance, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The training loss and, for the log, the mean squared error in [-1, 1] units."""
    latents, size_term = sampled(vae, wanted)
    drawn = vae.decode(latents).sample
    pixel = functional.l1_loss(drawn.float(), wanted)
    edges = sum(functional.l1_loss(a, b) for a, b in zip(gradients(drawn.float()), gradients(wanted), strict=True))
    loss = pixel + 0.5 * edges + 0.3 * perceptual(drawn, wanted) + size_term
    return loss, functional.mse_loss(drawn.detach().float(), wanted)


@torch.no_grad()
def psnr(vae: Autoencoder, pictures: np.ndarray, device: torch.device) -> float:
    """Peak signal-to-noise ratio in dB over all given pictures, through `encoded`."""
    errors = []
    for start in range(0, len(pictures), 64):
        wanted = batch_of(pictures, np.arange(start, min(start + 64, len(pictures))), device)
        drawn = vae.decode(encoded(vae, wanted)).sample.clamp(-1, 1)
        errors.append((drawn.float() - wanted).pow(2).mean(dim=(1, 2, 3)))
    return float(-10 * torch.cat(errors).div(4).mean().log10())


@torch.no_grad()
def set_latent_statistics(vae: Autoencoder, pictures: np.ndarray, device: torch.device) -> None:
    """Sets the scale (and, where the class has one, the shift) that gives the latents of `pictures` deviation 1."""
    latents = torch.cat([
        encoded(vae, batch_of(pictures, np.arange(start, start + 64), device))
        for start in range(0, min(1024, len(pictures)), 64)
    ])  # fmt: skip
    if isinstance(vae, AutoencoderKL):
        vae.register_to_config(shift_factor=round(float(latents.mean()), 5))
    vae.register_to_config(scaling_factor=round(1 / float(latents.std()), 5))
    print("latent mean and deviation by channel", latents.mean((0, 2, 3)).tolist(), latents.std((0, 2, 3)).tolist())


@torch.no_grad()
def running_average(averages: tuple[Tensor, ...], weights: tuple[Tensor, ...], count: Tensor) -> None:
    """Moves the averages towards the weights: over about a tenth of the `count` steps so far, at most over 500."""
    torch._foreach_lerp_(averages, weights, 1 - min(0.998, (float(count) + 1) / (float(count) + 10)))


def main() -> None:
    """Trains for the given time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("flux", "sana"), default="flux")
    parser.add_argument("--build", type=Path, default=Path("build"))
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--batch", type=int, default=16, help="pictures of 64 px in a step")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    rng = np.random.default_rng()
    device = torch.device(arguments.device)

    small = np.load(arguments.build / "pictures/vae64.npy", mmap_mode="r")
    large = np.load(arguments.build / "pictures/vae128.npy", mmap_mode="r")
    kept_back, small = np.asarray(small[-256:]), small[:-256]
    vae = new_autoencoder(arguments.model).to(device).to(memory_format=torch.channels_last)
    folder = arguments.build / arguments.model
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint, step = folder / "vae.pt", 0
    ends = {id(p) for module in (vae.encoder.conv_in, vae.decoder.conv_out) for p in module.parameters()}
    kernels = [p for p in vae.parameters() if p.ndim == 4 and id(p) not in ends]
    others = [p for p in vae.parameters() if p.ndim != 4 or id(p) in ends]
    optimizers = [
        Muon(kernels, lr=arguments.learning_rate, weight_decay=1e-2),
        torch.optim.AdamW(others, lr=arguments.learning_rate, betas=(0.9, 0.99), weight_decay=0.0),
    ]
    average = torch.optim.swa_utils.AveragedModel(vae, multi_avg_fn=running_average)
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device)
        vae.load_state_dict(saved["vae"])
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        average.load_state_dict(saved["average"])
        step = saved["step"]
    perceptual = PerceptualDistance().to(device)
    print(f"{sum(p.numel() for p in vae.parameters()) / 1e6:.2f}M parameters, from step {step}", flush=True)

    def save() -> None:
        state = {"vae": vae.state_dict(), "average": average.state_dict(), "step": step}
        state["optimizers"] = [optimizer.state_dict() for optimizer in optimizers]
        torch.save(state, checkpoint.with_suffix(".tmp"))
        checkpoint.with_suffix(".tmp").replace(checkpoint)

    begun, seen, marks = time.monotonic(), 0, []
    while (share := (time.monotonic() - begun) / (60 * arguments.minutes)) < 1:
        warm = min(1.0, (step + 1) / 50)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = arguments.learning_rate * warm * min(1.0, max(0.01, (1 - share) / 0.3))
        pool, count = (large, max(1, arguments.batch // 4)) if step % 8 == 7 else (small, arguments.batch)
        wanted = batch_of(pool, rng.choice(len(pool), count, replace=False), device)
        with torch.autocast(device.type, torch.bfloat16):
            loss, error = vae_loss(vae, perceptual, wanted)
        vae.zero_grad(set_to_none=True)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        average.update_parameters(vae)
        step, seen = step + 1, seen + count
        marks.append((loss.item(), error.item()))
        if step % 50 == 0:
            mean_loss, mean_error = np.mean(marks, axis=0)
            speed = seen / (time.monotonic() - begun)
            print(
                f"step {step} loss {mean_loss:.4f} psnr {-10 * np.log10(mean_error / 4):.2f} dB {speed:.1f} pictures/s",
                flush=True,
            )
            marks = []
        if step % 500 == 0:
            save()
            print(f"  kept-back psnr {psnr(average.module, kept_back, device):.2f} dB", flush=True)
    save()

    final = average.module.eval()
    set_latent_statistics(final, np.asarray(small[:1024]), device)
    final.save_pretrained(folder / "vae")
    print(f"done: step {step}, kept-back psnr {psnr(final, kept_back, device):.2f} dB, saved in {folder / 'vae'}")


if __name__ == "__main__":
    main()
