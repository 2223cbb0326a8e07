"""Tiny random pipelines of the real classes, and a folder of pictures, for tests that read models and photos from disk.

Every function writes a folder and returns its path; the same seed gives the same bytes. Nothing is downloaded. A
pipeline folder loads with `from_pretrained` and draws pictures (noise, of course) within a second on a CPU:

    FLUX.1   pixel stride 8 (VAE factor 4, token patch 2), width 32: 64 px = 64 image tokens
    SANA     pixel stride 8 (autoencoder factor 8, token patch 1), width 32: 64 px = 64 image tokens
"""

import json
from pathlib import Path

import numpy as np
import torch
from diffusers import (
    AutoencoderDC,
    AutoencoderKL,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    SanaPipeline,
    SanaTransformer2DModel,
)
from PIL import Image, ImageDraw
from tokenizers import pre_tokenizers
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    Gemma2Config,
    Gemma2Model,
    GemmaTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

EXIF_ORIENTATION = 0x0112
MODULATION = (
    "norm1.linear", "norm1_context.linear", "norm.linear", "norm_out.linear", "time_embed.linear", "img_mod.1",
    "txt_mod.1", "adaln_single.linear",
)  # fmt: skip
PRINTABLE = [chr(code) for code in range(0x21, 0x250) if chr(code).isprintable()]


def make_flux(folder: Path, *, layers: int = 3, single_layers: int = 5, guidance: bool = False, seed: int = 0) -> Path:
    """Write a FluxPipeline with `layers` double and `single_layers` single blocks; return `folder`.

    With `guidance` it is built like FLUX.1-dev (guidance embedding, shift by token count), without like FLUX.1-schnell.
    """
    folder = Path(folder)
    words, pieces = clip_tokenizer(folder / "tokenizer"), t5_tokenizer()
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=layers,
        num_single_layers=single_layers,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        pooled_projection_dim=20,
        guidance_embeds=guidance,
        axes_dims_rope=(4, 6, 6),
    )
    vae = kl_autoencoder()
    clip = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(words),
            hidden_size=20,
            intermediate_size=40,
            projection_dim=20,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=77,
            bos_token_id=words.bos_token_id,
            eos_token_id=words.eos_token_id,
            pad_token_id=words.pad_token_id,
        )
    )
    t5 = t5_encoder(pieces, 24)
    randomise(transformer, vae, clip, t5, seed=seed)
    narrow_posterior(vae)
    scheduler = FlowMatchEulerDiscreteScheduler(
        shift=3.0 if guidance else 1.0, use_dynamic_shifting=guidance, base_shift=0.5, max_shift=1.15
    )
    pipeline = FluxPipeline(scheduler, vae, clip, words, t5, pieces, transformer)
    pipeline.save_pretrained(folder)
    return folder


def make_sana(folder: Path, *, layers: int = 6, seed: int = 0) -> Path:
    """Write a SanaPipeline with `layers` blocks and the scheduler of the published SANA models; return `folder`.

    `SanaPipeline.__call__` draws at 512 px and scales down unless `use_resolution_binning=False`.
    """
    folder = Path(folder)
    tokenizer = gemma_tokenizer()
    transformer = SanaTransformer2DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=4,
        attention_head_dim=8,
        num_layers=layers,
        num_cross_attention_heads=2,
        cross_attention_head_dim=16,
        cross_attention_dim=32,
        caption_channels=24,
        mlp_ratio=2.5,
        sample_size=16,
        patch_size=1,
    )
    vae = AutoencoderDC(
        latent_channels=8,
        attention_head_dim=8,
        encoder_block_types=("ResBlock", "ResBlock", "ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "ResBlock", "ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 16, 16, 32),
        decoder_block_out_channels=(8, 16, 16, 32),
        encoder_layers_per_block=(1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1),
        encoder_qkv_multiscales=((), (), (), (5,)),
        decoder_qkv_multiscales=((), (), (), (5,)),
        scaling_factor=0.41407,
    )
    gemma = gemma_encoder(tokenizer, 24)
    randomise(transformer, vae, gemma, seed=seed)
    scheduler = DPMSolverMultistepScheduler(
        algorithm_type="dpmsolver++",
        beta_schedule="linear",
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=3.0,
    )
    pipeline = SanaPipeline(tokenizer, gemma, vae, transformer, scheduler)
    pipeline.save_pretrained(folder)
    return folder


def kl_autoencoder(*, levels: int = 3, channels: int = 4, shift_factor: float | None = 0.125) -> AutoencoderKL:
    """The autoencoder of FLUX.1 and Stable Diffusion 3, of factor 4 (8 with four levels)."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=(8, *[16] * (levels - 1)),
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=4,
        sample_size=128,
        scaling_factor=0.75,
        shift_factor=shift_factor,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def narrow_posterior(vae: AutoencoderKL) -> None:
    """Make the deviation of its latents as small as a trained autoencoder's."""
    with torch.no_grad():
        vae.encoder.conv_out.bias[vae.config.latent_channels :] -= 4.0


def t5_encoder(tokenizer: T5TokenizerFast, width: int) -> T5EncoderModel:
    """T5 with two layers that gives vectors of `width`."""
    return T5EncoderModel(
        T5Config(
            vocab_size=len(tokenizer),
            d_model=width,
            d_kv=width // 2,
            d_ff=2 * width,
            num_layers=2,
            num_heads=2,
            feed_forward_proj="gated-gelu",
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def gemma_encoder(tokenizer: GemmaTokenizer, width: int) -> Gemma2Model:
    """Gemma-2 with two layers that gives vectors of `width`."""
    return Gemma2Model(
        Gemma2Config(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=width // 2,
            query_pre_attn_scalar=width // 2,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def make_photos(folder: Path, *, seed: int = 0) -> Path:
    """Write five pictures of one shape before different backgrounds; return `folder`.

    Sizes and kinds differ on purpose: landscape, portrait, square and wide; PNG and JPEG; `2.jpg` is stored on its side
    and says so in EXIF (it is 96 wide, 128 high when turned); `4.png` is transparent at its border.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    subject = tuple(int(value) for value in random.integers(150, 256, 3))
    for number, (width, height) in enumerate([(128, 96), (96, 128), (160, 160), (200, 104), (110, 150)], start=1):
        picture = _picture(random, subject, width, height)
        if number == 2:
            exif = Image.Exif()
            exif[EXIF_ORIENTATION] = 6  # the viewer turns it by 90 degrees clockwise
            picture.transpose(Image.Transpose.ROTATE_90).save(folder / "2.jpg", quality=95, exif=exif)
        elif number == 4:
            alpha = Image.new("L", picture.size, 0)
            ImageDraw.Draw(alpha).rectangle((8, 8, width - 9, height - 9), fill=255)
            picture.putalpha(alpha)
            picture.save(folder / "4.png")
        elif number == 5:
            picture.save(folder / "5.jpg", quality=95)
        else:
            picture.save(folder / f"{number}.png")
    return folder


def _picture(random: np.random.Generator, subject: tuple[int, ...], width: int, height: int) -> Image.Image:
    """A colour gradient with a little noise and, somewhere on it, a disc with a square eye."""
    corners = random.integers(0, 200, (2, 2, 3)).astype(np.uint8)
    ground = np.asarray(Image.fromarray(corners).resize((width, height), Image.Resampling.BILINEAR), dtype=np.int16)
    noisy = ground + random.integers(-12, 13, (height, width, 3))
    picture = Image.fromarray(noisy.clip(0, 255).astype(np.uint8))
    radius = int(min(width, height) * random.uniform(0.25, 0.35))
    x, y = int(random.integers(radius, width - radius)), int(random.integers(radius, height - radius))
    draw = ImageDraw.Draw(picture)
    draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=subject)
    draw.rectangle((x - radius // 4, y - radius // 4, x + radius // 8, y + radius // 8), fill=(20, 20, 60))
    return picture


def randomise(*modules: nn.Module, seed: int) -> None:
    """Draw every parameter so that signals stay of order one and every block, gate and bias counts.

    All normal. Matrices and convolutions: variance 1 / inputs. Biases: deviation 0.1; those of modulation (gates,
    scales, shifts) and its tables: 0.5, so that no gate is shut; its matrices without a bias are three times as large.
    Scales of norms: 0.1 around their class's start.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in modules:
            for name, parameter in module.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                if "scale_shift_table" in name:
                    parameter.copy_(0.5 * noise)
                elif name.endswith("bias"):
                    modulates = name.removesuffix(".bias").endswith(MODULATION)
                    parameter.copy_((0.5 if modulates else 0.1) * noise)
                elif parameter.ndim == 1:
                    parameter.add_(0.1 * noise)
                else:
                    layer = module.get_submodule(name.rpartition(".")[0])
                    alone = name.removesuffix(".weight").endswith(MODULATION) and getattr(layer, "bias", None) is None
                    parameter.copy_((3.0 if alone else 1.0) * noise / parameter[0].numel() ** 0.5)
            module.eval()


def clip_tokenizer(folder: Path, **options: str) -> CLIPTokenizer:
    """CLIP's byte-level BPE without merges: each byte is a token, inside a word and at its end."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*symbols, *(symbol + "</w>" for symbol in symbols), "<|startoftext|>", "<|endoftext|>"]
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    return CLIPTokenizer.from_pretrained(folder, model_max_length=77, **options)


def t5_tokenizer() -> T5TokenizerFast:
    """T5's unigram model in which every printable character (up to Latin Extended-B) is a piece."""
    specials = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces = [(piece, -2.0) for piece in ["▁", *PRINTABLE]]
    return T5TokenizerFast(vocab=specials + pieces, extra_ids=0, model_max_length=512)


def gemma_tokenizer() -> GemmaTokenizer:
    """Gemma's BPE without merges: every printable character is a token, any other falls back to its bytes."""
    specials = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    tokens = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *PRINTABLE]
    return GemmaTokenizer(vocab={token: number for number, token in enumerate(tokens)}, merges=[], add_bos_token=True)
