"""The small SANA pipeline: its configurations, and how its parts are built and read again."""

from pathlib import Path

from diffusers import AutoencoderDC, DPMSolverMultistepScheduler, SanaPipeline, SanaTransformer2DModel
from torch import Tensor, nn
from transformers import Gemma2Config, Gemma2Model, GemmaTokenizer

from tools.make_tokenizers import LENGTH
from tools.model import TEXT, Parts, grow_embedding, start_linears

WIDTH_TEXT, LATENT_CHANNELS = 192, 16


class SanaParts(Parts):
    """`SanaTransformer2DModel` and `Gemma2Model`."""

    def __init__(
        self, transformer: SanaTransformer2DModel, text_encoder: Gemma2Model, tokenizer: GemmaTokenizer
    ) -> None:
        super().__init__()
        self.transformer, self.text_encoder, self.tokenizer = transformer, text_encoder, tokenizer
        self.depth, self.heads = transformer.config.num_layers, transformer.config.num_attention_heads

    def ids(self, captions: list[str]) -> dict[str, Tensor]:
        """Ids and mask, each (captions, 32), padded on the right as the pipeline does."""
        self.tokenizer.padding_side = "right"
        tokens = self.tokenizer([text.lower().strip() for text in captions], max_length=LENGTH, **TEXT)
        return {"text": tokens.input_ids, "mask": tokens.attention_mask}

    def forward(self, noisy: Tensor, sigma: Tensor, ids: dict[str, Tensor]) -> Tensor:
        """Velocity of noisy latents (batch, channels, height, width); the time runs from 0 to 1000."""
        return self.transformer(
            noisy,
            encoder_hidden_states=self.text_encoder(ids["text"], attention_mask=ids["mask"])[0],
            encoder_attention_mask=ids["mask"],
            timestep=1000 * sigma,
            return_dict=False,
        )[0]

    def pipeline(self, vae: AutoencoderDC, shift: float) -> SanaPipeline:
        """`SanaPipeline` with the solver of the published models."""
        scheduler = DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift, solver_order=2
        )
        return SanaPipeline(
            tokenizer=self.tokenizer,
            text_encoder=self.text_encoder,
            vae=vae,
            transformer=self.transformer,
            scheduler=scheduler,
        )


def new_parts(tokenizers: Path, depth: int = 12, heads: int = 8) -> SanaParts:
    """Parts with random weights and the tokenizer in a folder: `depth` blocks, width 32 times `heads`."""
    tokenizer = GemmaTokenizer.from_pretrained(tokenizers / "tokenizer")
    width = 32 * heads
    transformer = SanaTransformer2DModel(
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_attention_heads=heads,
        attention_head_dim=32,
        num_layers=depth,
        num_cross_attention_heads=width // 64,
        cross_attention_head_dim=64,
        cross_attention_dim=width,
        caption_channels=WIDTH_TEXT,
        mlp_ratio=2.5,
        sample_size=8,
        patch_size=1,
    )
    text_encoder = Gemma2Model(
        Gemma2Config(
            vocab_size=len(tokenizer),
            hidden_size=WIDTH_TEXT,
            intermediate_size=2 * WIDTH_TEXT,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=48,
            query_pre_attn_scalar=48,
            max_position_embeddings=512,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    start_linears(transformer, zero=lambda name: name in ("proj_out", "time_embed.linear") or "attn2.to_out" in name)
    nn.init.normal_(text_encoder.embed_tokens.weight, std=0.07)
    return SanaParts(transformer, text_encoder, tokenizer)


def saved_parts(folder: Path, tokenizers: Path) -> SanaParts:
    """The parts of a saved pipeline as float32; the tokenizer in the folder goes on from the pipeline's."""
    pipeline = SanaPipeline.from_pretrained(folder, vae=None)
    tokenizer = GemmaTokenizer.from_pretrained(tokenizers / "tokenizer")
    if not pipeline.tokenizer.get_vocab().items() <= tokenizer.get_vocab().items():
        raise SystemExit(f"The tokenizer in {tokenizers} does not go on from that of {folder}: remove it.")
    text_encoder = pipeline.text_encoder.float()
    grow_embedding(text_encoder, len(tokenizer))
    return SanaParts(pipeline.transformer.float(), text_encoder, tokenizer)
