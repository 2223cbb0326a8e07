"""Tiny random transformers of many kinds, most of them not among the families yet, with inputs and a BlockLayout."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import (
    AuraFlowTransformer2DModel,
    ChromaTransformer2DModel,
    CogView4Transformer2DModel,
    Flux2Transformer2DModel,
    Lumina2Transformer2DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    ZImageTransformer2DModel,
)
from torch import nn

from blockskip.method.layout import IMAGE, TEXT, BlockLayout
from tests.tiny import randomise

BATCH, TEXT_LENGTH, SIDE = 2, 6, 8  # SIDE: latent pixels; 16 image tokens of 2x2
ENDS = (BATCH, 4, SIDE, SIDE)  # latents


@dataclass
class Base:
    """A whole model, the arguments of its ``forward``, and where its blocks are.

    Args:
        targets: linear layers inside a block for LoRA.
    """

    model: Any
    inputs: dict[str, Any]
    layout: BlockLayout
    targets: tuple[str, ...] = ("to_q", "to_k", "to_v")

    def output(self) -> torch.Tensor:
        """What the model gives as it stands, as one tensor."""
        return first(self.model(**self.inputs))


def first(output: Any) -> torch.Tensor:
    """The first result of ``forward``, as one tensor (Z-Image gives a list)."""
    found = output[0]
    return torch.stack(list(found)) if isinstance(found, (list, tuple)) else found


def ragged_mask(dtype: torch.dtype = torch.bool) -> torch.Tensor:
    """(B, TEXT_LENGTH): the second prompt is two tokens shorter."""
    mask = torch.ones(BATCH, TEXT_LENGTH, dtype=dtype)
    mask[1, -2:] = 0
    return mask


def _ready(model: nn.Module) -> nn.Module:
    randomise(model, seed=1)
    return model.requires_grad_(False).eval()


def _ids(*axes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Position ids of image and text tokens; ``axes`` are the places of row and column."""
    rows = SIDE // 2
    image = torch.zeros(rows, rows, axes[0])
    image[..., 1] += torch.arange(rows)[:, None]
    image[..., 2] += torch.arange(rows)[None, :]
    return image.reshape(rows * rows, axes[0]), torch.zeros(TEXT_LENGTH, axes[0])


def flux2() -> Base:
    """Two streams, then one joint stream; modulation shared by all blocks."""
    model = Flux2Transformer2DModel(
        in_channels=16, num_layers=3, num_single_layers=4, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=24, timestep_guidance_channels=16, axes_dims_rope=(4, 4, 4, 4),
    )  # fmt: skip
    image, text = _ids(4)
    inputs = {
        "hidden_states": torch.randn(BATCH, 16, 16), "encoder_hidden_states": torch.randn(BATCH, TEXT_LENGTH, 24),
        "timestep": torch.tensor([0.3, 0.8]), "guidance": torch.tensor([1.0, 3.5]), "img_ids": image, "txt_ids": text,
        "return_dict": False,
    }  # fmt: skip
    returns = {"transformer_blocks": (TEXT, IMAGE), "single_transformer_blocks": (IMAGE,)}
    layout = BlockLayout(("transformer_blocks", "single_transformer_blocks"), returns, order="txt_img")
    return Base(_ready(model), inputs, layout, ("to_q", "to_k", "to_qkv_mlp_proj"))


def chroma() -> Base:
    """Two streams, then one joint stream; every block's modulation is a slice chosen by its number."""
    model = ChromaTransformer2DModel(
        in_channels=16, num_layers=3, num_single_layers=4, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=24, axes_dims_rope=(4, 6, 6), approximator_num_channels=16, approximator_hidden_dim=32,
        approximator_layers=2,
    )  # fmt: skip
    image, text = _ids(3)
    mask = torch.cat([ragged_mask(), torch.ones(BATCH, 16, dtype=torch.bool)], dim=1)
    inputs = {
        "hidden_states": torch.randn(BATCH, 16, 16), "encoder_hidden_states": torch.randn(BATCH, TEXT_LENGTH, 24),
        "timestep": torch.tensor([0.3, 0.8]), "img_ids": image, "txt_ids": text, "attention_mask": mask,
        "return_dict": False,
    }  # fmt: skip
    returns = {"transformer_blocks": (TEXT, IMAGE), "single_transformer_blocks": (IMAGE,)}
    layout = BlockLayout(("transformer_blocks", "single_transformer_blocks"), returns, order="txt_img")
    return Base(_ready(model), inputs, layout)


def aura_flow() -> Base:
    """Two streams, then one joint stream with register tokens before the text."""
    model = AuraFlowTransformer2DModel(
        sample_size=16, num_mmdit_layers=3, num_single_dit_layers=4, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=24, caption_projection_dim=32, pos_embed_max_size=64,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(ENDS), "encoder_hidden_states": torch.randn(BATCH, TEXT_LENGTH, 24),
        "timestep": torch.tensor([0.3, 0.8]), "return_dict": False,
    }  # fmt: skip
    returns = {"joint_transformer_blocks": (TEXT, IMAGE), "single_transformer_blocks": (IMAGE,)}
    layout = BlockLayout(("joint_transformer_blocks", "single_transformer_blocks"), returns, order="txt_img")
    return Base(_ready(model), inputs, layout)


def sd3() -> Base:
    """Two streams, image tokens first; the last block ends the text; image-only attention in the first two."""
    model = SD3Transformer2DModel(
        sample_size=16, in_channels=4, out_channels=4, num_layers=6, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=24, caption_projection_dim=32, pooled_projection_dim=20, pos_embed_max_size=16,
        dual_attention_layers=(0, 1), qk_norm="rms_norm",
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(ENDS), "encoder_hidden_states": torch.randn(BATCH, TEXT_LENGTH, 24),
        "pooled_projections": torch.randn(BATCH, 20), "timestep": torch.tensor([300.0, 800.0]), "return_dict": False,
    }  # fmt: skip
    return Base(_ready(model), inputs, BlockLayout(("transformer_blocks",), (TEXT, IMAGE), order="img_txt"))


def qwen_image() -> Base:
    """Two streams; the text's mask makes the attention mask."""
    model = QwenImageTransformer2DModel(
        in_channels=16, out_channels=4, num_layers=6, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=24, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(BATCH, 16, 16), "encoder_hidden_states": torch.randn(BATCH, TEXT_LENGTH, 24),
        "encoder_hidden_states_mask": ragged_mask(), "timestep": torch.tensor([0.3, 0.8]),
        "img_shapes": [[(1, 4, 4)]] * BATCH, "return_dict": False,
    }  # fmt: skip
    return Base(_ready(model), inputs, BlockLayout(("transformer_blocks",), (TEXT, IMAGE), order="txt_img"))


def lumina2() -> Base:
    """One joint stream, text first and of each sample's own length; refiners before the blocks."""
    model = Lumina2Transformer2DModel(
        sample_size=16, in_channels=4, hidden_size=32, num_layers=6, num_refiner_layers=1, num_attention_heads=2,
        num_kv_heads=1, multiple_of=16, axes_dim_rope=(4, 6, 6), axes_lens=(64, 16, 16), cap_feat_dim=24,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(ENDS), "timestep": torch.tensor([0.7, 0.2]),
        "encoder_hidden_states": torch.randn(BATCH, TEXT_LENGTH, 24), "encoder_attention_mask": ragged_mask(),
        "return_dict": False,
    }  # fmt: skip
    return Base(_ready(model), inputs, BlockLayout(("layers",), (IMAGE,), order="txt_img"))


def z_image() -> Base:
    """One joint stream, image first; lists of samples in and out; refiners before the blocks; a head by patch size."""
    model = ZImageTransformer2DModel(
        in_channels=4, dim=32, n_layers=6, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=24,
        axes_dims=[4, 6, 6], axes_lens=[128, 32, 32],
    )  # fmt: skip
    inputs = {
        "x": list(torch.randn(BATCH, 4, 1, SIDE, SIDE)), "t": torch.tensor([0.7, 0.2]),
        "cap_feats": [torch.randn(TEXT_LENGTH, 24), torch.randn(TEXT_LENGTH - 2, 24)], "return_dict": False,
    }  # fmt: skip
    return Base(_ready(model), inputs, BlockLayout(("layers",), (IMAGE,), "all_final_layer", "img_txt"))


def cog_view4() -> Base:
    """Two streams; blocks return the image first."""
    model = CogView4Transformer2DModel(
        in_channels=4, out_channels=4, num_layers=6, attention_head_dim=16, num_attention_heads=2, text_embed_dim=24,
        time_embed_dim=32, condition_dim=8, pos_embed_max_size=16, sample_size=16, rope_axes_dim=(16, 16),
    )  # fmt: skip
    size, corner = torch.full((BATCH, 2), 64.0), torch.zeros(BATCH, 2)
    inputs = {
        "hidden_states": torch.randn(ENDS), "encoder_hidden_states": torch.randn(BATCH, TEXT_LENGTH, 24),
        "timestep": torch.tensor([300.0, 800.0]), "original_size": size, "target_size": size, "crop_coords": corner,
        "attention_mask": ragged_mask(torch.int64), "return_dict": False,
    }  # fmt: skip
    return Base(_ready(model), inputs, BlockLayout(("transformer_blocks",), (IMAGE, TEXT), order="txt_img"))


BASES: tuple[Callable[[], Base], ...] = (
    flux2, chroma, aura_flow, sd3, qwen_image, lumina2, z_image, cog_view4,
)  # fmt: skip
