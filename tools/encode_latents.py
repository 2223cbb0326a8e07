"""Encodes pools of pictures with a trained autoencoder: normalised float16 latents (count, channels, rows, columns).

    python -m tools.encode_latents --model flux --build build

Reads `build/pictures/train64` and `train128`, writes `build/MODEL/latents/` under the same names.
"""

import argparse
import shutil
from pathlib import Path

import numpy as np
import torch

from tools.autoencoders import CLASSES, Autoencoder, batch_of, encoded


@torch.no_grad()
def encode(vae: Autoencoder, pictures: np.ndarray, device: torch.device) -> np.ndarray:
    """Shifted and scaled latents of uint8 pictures (count, side, side, 3)."""
    shift = vae.config.get("shift_factor") or 0.0
    batches = []
    for start in range(0, len(pictures), 64):
        rows = np.arange(start, min(start + 64, len(pictures)))
        with torch.autocast(device.type, torch.bfloat16):
            latents = encoded(vae, batch_of(pictures, rows, device)).float()
        batches.append(((latents - shift) * vae.config.scaling_factor).half().cpu().numpy())
    return np.concatenate(batches)


def main() -> None:
    """Encodes the pools of one model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(CLASSES), default="flux")
    parser.add_argument("--build", type=Path, default=Path("build"))
    parser.add_argument("--pools", nargs="*", default=["train64", "train128"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)

    folder = arguments.build / arguments.model
    vae = CLASSES[arguments.model].from_pretrained(folder / "vae").to(device, memory_format=torch.channels_last).eval()
    (folder / "latents").mkdir(parents=True, exist_ok=True)
    for pool in arguments.pools:
        pictures = np.load(arguments.build / f"pictures/{pool}.npy", mmap_mode="r")
        latents = encode(vae, pictures, device)
        np.save(folder / f"latents/{pool}.npy", latents)
        shutil.copy(arguments.build / f"pictures/{pool}.json", folder / f"latents/{pool}.json")
        some = latents[:2000].astype(np.float32)
        print(f"{pool}: {len(latents)} latents, mean {some.mean():.3f}, deviation {some.std():.3f}", flush=True)


if __name__ == "__main__":
    main()
