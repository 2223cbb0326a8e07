"""Encodes a pool of pictures with the trained VAE: normalised float16 latents (count, 4, side/4, side/4).

python -m tools.encode_latents --pictures build/pictures/train64 --out build/latents/train64
"""

import argparse
import shutil
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL

from tools.train_vae import batch_of


def main() -> None:
    """Encodes one pool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=Path("build"))
    parser.add_argument("--pictures", type=Path, required=True, help="stem of a .npy and a .json")
    parser.add_argument("--out", type=Path, required=True, help="stem; .npy and .json are written")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)

    vae = AutoencoderKL.from_pretrained(arguments.build / "vae").to(device).to(memory_format=torch.channels_last).eval()
    pictures = np.load(arguments.pictures.with_suffix(".npy"), mmap_mode="r")
    side = pictures.shape[1] // 4
    latents = np.empty((len(pictures), 4, side, side), np.float16)
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
        for start in range(0, len(pictures), 64):
            rows = np.arange(start, min(start + 64, len(pictures)))
            mode = vae.encode(batch_of(pictures, rows, device)).latent_dist.mode().float()
            latents[rows] = ((mode - vae.config.shift_factor) * vae.config.scaling_factor).half().cpu().numpy()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    np.save(arguments.out.with_suffix(".npy"), latents)
    shutil.copy(arguments.pictures.with_suffix(".json"), arguments.out.with_suffix(".json"))
    some = latents[:2000].astype(np.float32)
    print(f"{len(latents)} latents, mean {some.mean():.3f}, deviation {some.std():.3f}")


if __name__ == "__main__":
    main()
