"""The autoencoder without the half that a phase has no use for.

    pictures to latents    encoder | quant_conv
    latents to pictures                           post_quant_conv | decoder

The other half is never filled from the file, so it takes no memory, on the device or the host, and its pages of the
mapped file are not read. What lies beside the halves (FLUX.2's statistics) is always there.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NoReturn

import torch
from torch import nn

from blockskip.errors import UserError
from blockskip.loading.construction import changed_after_construction
from blockskip.loading.source import ModelSource

Half = Literal["encoder", "decoder"]
#: What each half is made of, by the names that the autoencoders of diffusers share; some lack the convolutions.
PARTS: dict[Half, tuple[str, ...]] = {"encoder": ("encoder", "quant_conv"), "decoder": ("decoder", "post_quant_conv")}


class Absent(nn.Module):
    """Stands where a part of an autoencoder was left out.

    Args:
        name: of the part.
        half: that was kept.
    """

    def __init__(self, name: str, half: Half) -> None:
        super().__init__()
        self._what = f"{name} of an autoencoder that was loaded for its {half} alone"

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Nobody may ask for it.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(f"The {self._what} was asked for; load the other half for it.")


def keep_half(vae: nn.Module, half: Half) -> None:
    """Take the other half out of an autoencoder, in place."""
    for kind, names in PARTS.items():
        for name in names if kind != half else ():
            if isinstance(getattr(vae, name, None), nn.Module):
                setattr(vae, name, Absent(name, half))


def load_autoencoder(source: ModelSource, half: Half, dtype: torch.dtype, device: torch.device) -> Any:
    """One half of the pipeline's autoencoder, frozen and in eval mode; the bits are those of the whole one.

    Args:
        half: ``encoder`` for ``Family.encode_pixels``, ``decoder`` for ``Family.decode``.

    Raises:
        UserError: the files lack a tensor of it.
    """
    with changed_after_construction(source.part_class("vae"), partial(keep_half, half=half)):
        vae = source.load("vae", dtype)
    for name, value in vae.state_dict().items():
        if value.is_meta:
            raise UserError(f'"{source.part_folder("vae")}" lacks the tensor "{name}"; fetch the model again.')
    return vae.to(device)
