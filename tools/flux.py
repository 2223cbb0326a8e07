"""The small FLUX pipeline: its configurations, and how its parts are built and read again."""

from pathlib import Path

from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5Tokenizer

from tools.make_tokenizers import LENGTH
from tools.model import TEXT, Parts, grow_embedding, start_linears

WIDTH_POOLED, WIDTH_TEXT = 128, 192


class FluxParts(Parts):
    """`FluxTransformer2DModel`, `CLIPTextModel` and `T5EncoderModel`."""

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
        self.depth, self.heads = transformer.config.num_layers, transformer.config.num_attention_heads

    def ids(self, captions: list[str]) -> dict[str, Tensor]:
        """Ids of both tokenizers, each (captions, 32)."""
        return {
            "pooled": self.tokenizer(captions, max_length=LENGTH, **TEXT).input_ids,
            "text": self.tokenizer_2(captions, max_length=LENGTH, **TEXT).input_ids,
        }

    def forward(self, noisy: Tensor, sigma: Tensor, ids: dict[str, Tensor]) -> Tensor:
        """Velocity of noisy latents (batch, channels, height, width), packed for the transformer and unpacked again."""
        velocity = self.transformer(
            hidden_states=pack(noisy),
            timestep=sigma,
            pooled_projections=self.text_encoder(ids["pooled"]).pooler_output,
            encoder_hidden_states=self.text_encoder_2(ids["text"])[0],
            img_ids=image_places(noisy),
            txt_ids=noisy.new_zeros(LENGTH, 3),
            return_dict=False,
        )[0]
        return unpack(velocity, noisy.shape)

    def pipeline(self, vae: AutoencoderKL, shift: float) -> FluxPipeline:
        """`FluxPipeline` with the Euler scheduler."""
        return FluxPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=shift, use_dynamic_shifting=False),
            vae=vae,
            text_encoder=self.text_encoder,
            tokenizer=self.tokenizer,
            text_encoder_2=self.text_encoder_2,
            tokenizer_2=self.tokenizer_2,
            transformer=self.transformer,
        )


def pack(latents: Tensor) -> Tensor:
    """(batch, channels, height, width) to (batch, height/2 * width/2, channels * 4), as `FluxPipeline` packs."""
    batch, channels, height, width = latents.shape
    latents = latents.view(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return latents.reshape(batch, height // 2 * (width // 2), channels * 4)


def unpack(tokens: Tensor, shape: tuple[int, ...]) -> Tensor:
    """What `pack` undoes: tokens to latents of `shape`."""
    batch, channels, height, width = shape
    tokens = tokens.view(batch, height // 2, width // 2, channels, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return tokens.reshape(shape)


def image_places(latents: Tensor) -> Tensor:
    """The token places (0, row, column) of latents (.., height, width), shape (height/2 * width/2, 3)."""
    rows, columns = latents.shape[-2] // 2, latents.shape[-1] // 2
    places = latents.new_zeros(rows, columns, 3)
    places[..., 1] += latents.new_ones(rows).cumsum(0)[:, None] - 1
    places[..., 2] += latents.new_ones(columns).cumsum(0)[None, :] - 1
    return places.view(-1, 3)


def new_parts(tokenizers: Path, depth: int = 4, heads: int = 4) -> FluxParts:
    """Parts with random weights and the tokenizers in a folder: `depth` double and twice as many single blocks, width
    64 times `heads`.
    """
    tokenizer = CLIPTokenizer.from_pretrained(tokenizers / "tokenizer")
    tokenizer_2 = T5Tokenizer.from_pretrained(tokenizers / "tokenizer_2")
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=depth,
        num_single_layers=2 * depth,
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
    start_linears(transformer, zero=lambda name: ".norm" in name or name.startswith(("norm_out", "proj_out")))
    nn.init.normal_(text_encoder.embeddings.token_embedding.weight, std=0.02)
    nn.init.normal_(text_encoder_2.shared.weight, std=0.5)
    return FluxParts(transformer, text_encoder, text_encoder_2, tokenizer, tokenizer_2)


def saved_parts(folder: Path, tokenizers: Path) -> FluxParts:
    """The parts of a saved pipeline as float32; the tokenizers in the folder go on from the pipeline's."""
    pipeline = FluxPipeline.from_pretrained(folder, vae=None)
    tokenizer = CLIPTokenizer.from_pretrained(tokenizers / "tokenizer")
    tokenizer_2 = T5Tokenizer.from_pretrained(tokenizers / "tokenizer_2")
    for old, new in ((pipeline.tokenizer, tokenizer), (pipeline.tokenizer_2, tokenizer_2)):
        if not old.get_vocab().items() <= new.get_vocab().items():
            raise SystemExit(f"The tokenizers in {tokenizers} do not go on from those of {folder}: remove them.")
    text_encoder, text_encoder_2 = pipeline.text_encoder.float(), pipeline.text_encoder_2.float()
    grow_embedding(text_encoder, len(tokenizer))
    grow_embedding(text_encoder_2, len(tokenizer_2))
    return FluxParts(pipeline.transformer.float(), text_encoder, text_encoder_2, tokenizer, tokenizer_2)
