"""What FLUX.1 and the models built after it share: two streams, tokens of 2x2 latent pixels, given positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from blockskip.families.base import Text
from blockskip.families.kl import KLFamily
from blockskip.families.packing import grid_ids, pack_tokens, shift_by_tokens, unpack_tokens
from blockskip.families.placing import side_by_side, take_own_positions
from blockskip.method.layout import IMAGE, TEXT, BlockLayout


class FluxLike(KLFamily):
    """Double blocks, then single ones, all with a text and an image stream; time input sigma, output noise - x."""

    layout: ClassVar[BlockLayout] = BlockLayout(
        lists=("transformer_blocks", "single_transformer_blocks"), returns=(TEXT, IMAGE), order="txt_img"
    )
    lora_targets = (
        "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
        "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
        "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2",
    )  # fmt: skip
    text_in_blocks = False
    takes_positions = True

    def token_patch(self, transformer_config: Mapping[str, Any]) -> int:
        """The pipeline packs 2x2 latent pixels into a token."""
        return 2

    def prepare(self, model: Any) -> None:
        """Let each sample have ids of its own."""
        take_own_positions(model)

    def forward_inputs(
        self, config: Mapping[str, Any], latents: torch.Tensor, sigma: torch.Tensor, text: Text, guidance: float
    ) -> dict[str, Any]:
        """Packed latents (B, h/2 * w/2, 4C), ids from 0 on the patch's own grid, zeros for the text."""
        prompt = text["prompt_embeds"]
        return {
            "hidden_states": pack_tokens(latents),
            "encoder_hidden_states": prompt,
            "timestep": sigma,
            "img_ids": grid_ids(latents.shape[2] // 2, latents.shape[3] // 2, 3, latents.device),
            "txt_ids": torch.zeros(prompt.shape[1], 3, device=latents.device),
            "return_dict": False,
        }

    def placed(self, inputs: Mapping[str, Any], positions: torch.Tensor) -> dict[str, Any]:
        """Ids of the image and of the text, of each sample side by side."""
        return side_by_side(inputs, positions)

    def velocity(self, output: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        """The output, unpacked."""
        return unpack_tokens(output, latents)

    def set_timesteps(self, scheduler: Any, steps: int, tokens: int, device: torch.device) -> None:
        """Sigmas from 1 to 1/steps, shifted by the number of image tokens where the scheduler asks for it."""
        mu = shift_by_tokens(scheduler, tokens)
        if scheduler.config.get("use_flow_sigmas"):
            scheduler.set_timesteps(steps, device=device, mu=mu)
        else:
            scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), device=device, mu=mu)
