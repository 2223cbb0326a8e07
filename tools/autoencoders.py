"""The autoencoders of the small pipelines: their configurations, and how pictures go in."""

import numpy as np
import torch
from diffusers import AutoencoderDC, AutoencoderKL
from torch import Tensor

CLASSES = {"flux": AutoencoderKL, "sana": AutoencoderDC}
Autoencoder = AutoencoderKL | AutoencoderDC

FLUX = {
    "in_channels": 3,
    "out_channels": 3,
    "down_block_types": ("DownEncoderBlock2D",) * 3,
    "up_block_types": ("UpDecoderBlock2D",) * 3,
    "block_out_channels": (32, 64, 128),
    "layers_per_block": 1,
    "latent_channels": 4,
    "norm_num_groups": 8,
    "sample_size": 64,
    "mid_block_add_attention": False,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
SANA_BLOCKS = ("ResBlock", "ResBlock", "ResBlock", "EfficientViTBlock")
SANA = {
    "in_channels": 3,
    "latent_channels": 16,
    "attention_head_dim": 32,
    "encoder_block_types": SANA_BLOCKS,
    "decoder_block_types": SANA_BLOCKS,
    "encoder_block_out_channels": (32, 64, 128, 128),
    "decoder_block_out_channels": (32, 64, 128, 128),
    "encoder_layers_per_block": (1, 1, 1, 1),
    "decoder_layers_per_block": (1, 1, 1, 1),
    "encoder_qkv_multiscales": ((), (), (), ()),
    "decoder_qkv_multiscales": ((), (), (), ()),
}


def new_autoencoder(model: str) -> Autoencoder:
    """The autoencoder of the small `flux` or `sana` pipeline, with random weights."""
    return AutoencoderKL(**FLUX) if model == "flux" else AutoencoderDC(**SANA)


def batch_of(pictures: np.ndarray, rows: np.ndarray, device: torch.device) -> Tensor:
    """The given rows as float32 in [-1, 1], shape (batch, 3, side, side)."""
    chosen = torch.from_numpy(pictures[np.sort(rows)]).to(device)
    return chosen.permute(0, 3, 1, 2).float().div(127.5).sub(1).contiguous(memory_format=torch.channels_last)


def encoded(vae: Autoencoder, pictures: Tensor) -> Tensor:
    """The latents without randomness: the posterior's mode, or what the deterministic encoder gives."""
    output = vae.encode(pictures)
    return output.latent if isinstance(vae, AutoencoderDC) else output.latent_dist.mode()
