"""The small models' training: it goes on where it was, begins from a saved pipeline, and gives a plain pipeline."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderDC, AutoencoderKL, DiffusionPipeline

from tools import export
from tools.attention import explicit_attention, fused_attention
from tools.captions import BACKGROUNDS, OBJECTS, STYLES, caption
from tools.flux import image_places, pack, unpack
from tools.make_tokenizers import LENGTH
from tools.model import grow_embedding
from tools.train import KEPT_BACK, Pool, build_parts, flow_loss, optimizers_for, train

VAES = {
    "flux": lambda: AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(8, 8, 8), norm_num_groups=4, latent_channels=4, shift_factor=0.1,
    ),
    "sana": lambda: AutoencoderDC(
        latent_channels=16, encoder_block_out_channels=(16,) * 4, decoder_block_out_channels=(16,) * 4,
        encoder_layers_per_block=(1,) * 4, decoder_layers_per_block=(1,) * 4,
        encoder_qkv_multiscales=((),) * 4, decoder_qkv_multiscales=((),) * 4,
    ),
}  # fmt: skip
SHAPES = {"flux": (4, 16), "sana": (16, 8)}


@pytest.fixture(params=["flux", "sana"])
def work(request: pytest.FixtureRequest, tmp_path: Path) -> argparse.Namespace:
    """A work folder with small pools, and the options of a training of two steps or so."""
    model, rng = request.param, np.random.default_rng(0)
    channels, rows = SHAPES[model]
    (tmp_path / model / "latents").mkdir(parents=True)
    for side in (64, 128):
        size = rows * side // 64
        stem = tmp_path / model / f"latents/train{side}"
        np.save(stem.with_suffix(".npy"), rng.normal(size=(KEPT_BACK + 8, channels, size, size)).astype(np.float16))
        captions = [caption(rng, OBJECTS[index % len(OBJECTS)], "beach") for index in range(KEPT_BACK + 8)]
        stem.with_suffix(".json").write_text(json.dumps(captions))
    VAES[model]().save_pretrained(tmp_path / model / "vae")
    return argparse.Namespace(
        model=model, build=tmp_path, start=None, minutes=0.01, depth=1, heads=2, batch=4, batch_large=2, large_every=2,
        learning_rate=1e-3, learning_rate_others=1e-3, decay_share=0.4, average=0.9, compile=False, device="cpu",
    )  # fmt: skip


def test_a_training_goes_on_and_gives_a_plain_pipeline(
    work: argparse.Namespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train(work)
    first = torch.load(work.build / work.model / "state.pt")
    train(work)
    second = torch.load(work.build / work.model / "state.pt")
    assert second["step"] > first["step"] > 0 and f"from step {first['step']}" in capsys.readouterr().out
    assert second["pictures"] > first["pictures"] and second["seconds"] > first["seconds"]

    out = work.build / "exported"
    monkeypatch.setattr(sys, "argv", ["export", "--model", work.model, "--build", str(work.build), "--out", str(out)])
    export.main()
    about = json.loads((out / "builtin.json").read_text())
    assert str(work.build) not in "".join(path.read_text(encoding="utf-8") for path in out.rglob("*.json"))
    assert about["trained"]["steps"] == second["step"] and len(about["objects"]) == len(OBJECTS)
    script = (
        "import json, sys; from diffusers import DiffusionPipeline; p = DiffusionPipeline.from_pretrained(sys.argv[1]);"
        "call = json.load(open(sys.argv[1] + '/builtin.json'))['call'] | {'num_inference_steps': 2};"
        "print(p('a dog', **call).images[0].size); assert not {'blockskip', 'tools'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(out)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(64, 64)"

    work.start = out  # and once more from the saved pipeline, with fresh optimisers
    (work.build / work.model / "state.pt").unlink()
    parts = build_parts(work.model, work.build, out)
    weight = next(iter(parts.transformer.transformer_blocks.parameters()))
    kept = DiffusionPipeline.from_pretrained(out, vae=None).transformer.transformer_blocks
    assert torch.equal(weight, next(iter(kept.parameters())).float())
    train(work)
    assert torch.load(work.build / work.model / "state.pt")["step"] > second["step"]


def test_every_weight_has_one_optimiser_and_the_loss_falls(work: argparse.Namespace) -> None:
    parts = build_parts(work.model, work.build, None, 1, 2)
    optimizers = optimizers_for(parts, 1e-2, 1e-2)
    held = [id(weight) for optimizer in optimizers for weight in optimizer.param_groups[0]["params"]]
    assert sorted(held) == sorted(id(weight) for weight in parts.parameters())
    assert all(weight.ndim in (2, 4) for weight in optimizers[0].param_groups[0]["params"])
    pool = Pool(work.build / work.model / "latents/train64", parts, 1.0, torch.device("cpu"))
    losses = []
    for _ in range(25):
        loss = flow_loss(parts, pool, np.arange(8), torch.Generator().manual_seed(0))
        parts.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_pools_keep_their_last_pictures_back(work: argparse.Namespace) -> None:
    parts = build_parts(work.model, work.build, None, 1, 2)
    pool = Pool(work.build / work.model / "latents/train64", parts, 1.0, torch.device("cpu"))
    rows = np.concatenate([pool.draw(np.random.default_rng(seed), 4) for seed in range(50)])
    assert set(rows) == set(range(8))
    latents, ids = pool.batch(np.array([3, 1]))
    assert torch.equal(latents, torch.from_numpy(pool.latents[[1, 3]]).float())
    assert all(value.shape == (2, LENGTH) for value in ids.values())


def test_new_words_come_after_the_old_ones(work: argparse.Namespace) -> None:
    parts = build_parts(work.model, work.build, None, 1, 2)
    old = parts.text_encoder.get_input_embeddings().weight.detach().clone()
    grow_embedding(parts.text_encoder, len(old) + 3)
    new = parts.text_encoder.get_input_embeddings().weight
    assert new.shape == (len(old) + 3, old.shape[1]) and torch.equal(new[: len(old)], old)
    assert new[len(old) :].std().item() == pytest.approx(old.std().item(), rel=0.2)
    assert parts.ids(["a photo of a dog"])["text"].max() < len(new)


@pytest.mark.parametrize("masked", [False, True])
def test_explicit_attention_is_the_fused_one(masked: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 3, count, 8, generator=generator) for count in (7, 5, 5))
    mask = torch.randn(2, 1, 7, 5, generator=generator) if masked else None
    torch.testing.assert_close(explicit_attention(query, key, value, mask), fused_attention(query, key, value, mask))


def test_unpack_undoes_pack_and_places_follow_rows() -> None:
    latents = torch.randn(2, 4, 4, 6)
    assert torch.equal(unpack(pack(latents), latents.shape), latents)
    places = image_places(latents)
    assert places.shape == (6, 3) and places[:, 1].tolist() == [0, 0, 0, 1, 1, 1]
    assert places[:, 2].tolist() == [0, 1, 2, 0, 1, 2]


def test_captions_name_object_background_size_and_side() -> None:
    rng = np.random.default_rng(0)
    for thing in OBJECTS:
        texts = [caption(rng, thing, "snow", "flat", "small", "on the left") for _ in range(60)]
        assert "" in texts and any(thing.name in text for text in texts)
        assert any("small" in text and "on the left" in text and BACKGROUNDS["snow"] in text for text in texts)
        assert all(text.startswith(("a flat drawing of", "a drawing of")) for text in texts if text)
    assert {style.package for style in STYLES.values()} == {"@lobehub/fluent-emoji-3d", "@lobehub/fluent-emoji-flat"}
