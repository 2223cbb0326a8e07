"""The small FLUX pipeline: its configurations, and how its parts are built, saved and read again."""

import shutil
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5Tokenizer

from tools.make_tokenizers import LENGTH, clip_tokenizer, t5_tokenizer

WIDTH_POOLED, WIDTH_TEXT = 128, 192


class Parts(nn.Module):
    """What is trained together: the transformer and the two text encoders; with their tokenizers."""

    def __init__(
        self,
        transformer: FluxTransformer2DModel,
        text_encoder: CLIPTextModel,
        text_encoder_2: T5EncoderModel,
        tokenizer: CLIPTokenizer,
        tokenizer_2: T5Tokenizer,
    ) -> None:
        super().__init__()
        self.transformer, self.text_encoder, self.text_encoder_2 = transformer, text_encoder, text_encoder_2
        self.tokenizer, self.tokenizer_2 = tokenizer, tokenizer_2

    def forward(
        self,
        noisy: Tensor,
        sigma: Tensor,
        pooled_ids: Tensor,
        text_ids: Tensor,
        image_places: Tensor,
        text_places: Tensor,
    ) -> Tensor:
        """Velocity (batch, tokens, 16) of packed noisy latents of that shape; sigma (batch,), ids (batch, 32)."""
        return self.transformer(
            hidden_states=noisy,
            timestep=sigma,
            pooled_projections=self.text_encoder(pooled_ids).pooler_output,
            encoder_hidden_states=self.text_encoder_2(text_ids)[0],
            img_ids=image_places,
            txt_ids=text_places,
            return_dict=False,
        )[0]


def tokenizers(build: Path) -> tuple[CLIPTokenizer, T5Tokenizer]:
    """The tokenizers of this work folder, made when they are not there yet.

    Learning merges breaks ties at random, so the ids that a training began with must be kept.
    """
    folders = build / "tokenizer", build / "tokenizer_2"
    if not all(folder.exists() for folder in folders):
        for tokenizer, folder in zip((clip_tokenizer(), t5_tokenizer()), folders, strict=True):
            tokenizer.save_pretrained(folder)
    return CLIPTokenizer.from_pretrained(folders[0]), T5Tokenizer.from_pretrained(folders[1])


def new_parts(build: Path, heads: int = 4) -> Parts:
    """Parts with random weights and the work folder's tokenizers; the transformer's width is 64 times `heads`."""
    tokenizer, tokenizer_2 = tokenizers(build)
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=4,
        num_single_layers=8,
        attention_head_dim=64,
        num_attention_heads=heads,
        joint_attention_dim=WIDTH_TEXT,
        pooled_projection_dim=WIDTH_POOLED,
        guidance_embeds=False,
        axes_dims_rope=(16, 24, 24),
    )
    text_encoder = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=WIDTH_POOLED,
            intermediate_size=2 * WIDTH_POOLED,
            projection_dim=WIDTH_POOLED,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    text_encoder_2 = T5EncoderModel(
        T5Config(
            vocab_size=len(tokenizer_2),
            d_model=WIDTH_TEXT,
            d_kv=48,
            d_ff=2 * WIDTH_TEXT,
            num_layers=2,
            num_heads=4,
            feed_forward_proj="gated-gelu",
            dropout_rate=0.0,
            pad_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=0,
        )
    )
    for module in transformer.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear) and (".norm" in name or name.startswith(("norm_out", "proj_out"))):
            nn.init.zeros_(module.weight)
    nn.init.normal_(text_encoder.embeddings.token_embedding.weight, std=0.02)
    nn.init.normal_(text_encoder_2.shared.weight, std=0.5)
    return Parts(transformer, text_encoder, text_encoder_2, tokenizer, tokenizer_2)


def saved_parts(folder: Path) -> Parts:
    """The parts of a saved pipeline, as float32."""
    pipeline = FluxPipeline.from_pretrained(folder, vae=None)
    return Parts(
        pipeline.transformer.float(),
        pipeline.text_encoder.float(),
        pipeline.text_encoder_2.float(),
        pipeline.tokenizer,
        pipeline.tokenizer_2,
    )


def save_pipeline(parts: Parts, vae: AutoencoderKL, shift: float, folder: Path, description: str) -> None:
    """Writes a bfloat16 `FluxPipeline` and its `builtin.json` beside `folder`, then puts them in its place."""
    pipeline = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=shift, use_dynamic_shifting=False),
        vae=vae,
        text_encoder=parts.text_encoder,
        tokenizer=parts.tokenizer,
        text_encoder_2=parts.text_encoder_2,
        tokenizer_2=parts.tokenizer_2,
        transformer=parts.transformer,
    ).to(torch.bfloat16)
    fresh, old = folder.with_name(f"{folder.name}.new"), folder.with_name(f"{folder.name}.old")
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    pipeline.save_pretrained(fresh)
    (fresh / "builtin.json").write_text(description, encoding="utf-8")
    for file in fresh.rglob("*.safetensors"):
        file.chmod(0o644)
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
