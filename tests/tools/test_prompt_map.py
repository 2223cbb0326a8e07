"""The map that ships is that of the subjects' prompts, and is applied as it was fitted."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from blockskip import builtin
from blockskip.benchmark.subjects import known_backgrounds
from blockskip.evaluation.encoder import ImageEncoder
from blockskip.evaluation.prompt_map import PromptMap
from tests.evaluation.pictures import ball, grass, stripes
from tools.captions import BACKGROUNDS
from tools.features import Features, LinearMap, fit_ridge
from tools.prompt_map import flattened, sentences_of_subjects


class Fixed:
    """An encoder with a row of its own for each of the first pictures."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def embed(self, images: list[Image.Image]) -> torch.Tensor:
        return self.rows[: len(images)]


def random_map(outputs: int, seed: int) -> LinearMap:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.rand(200, 1328, generator=generator) - 0.3
    return fit_ridge(inputs, torch.randn(200, outputs, generator=generator), 0.1)


def test_the_shipped_file_has_every_sentence_and_background() -> None:
    shipped = PromptMap(ImageEncoder())
    assert shipped.sentences == sentences_of_subjects()
    assert tuple(shipped.backgrounds) == known_backgrounds() == tuple(BACKGROUNDS.values())
    assert builtin.prompt_map_path().stat().st_size < 2 * 2**20


def test_it_is_applied_as_it_was_fitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, background = random_map(384, 0), random_map(3, 1)
    vectors = torch.nn.functional.normalize(torch.randn(2, 384), dim=1)
    header = {"sentences": json.dumps(["one", "two"]), "backgrounds": json.dumps(["a", "b", "c"])}
    tensors = {**flattened("text", text), **flattened("background", background), "sentences": vectors.half()}
    save_file(tensors, tmp_path / "map.safetensors", metadata=header)
    monkeypatch.setattr(builtin, "prompt_map_path", lambda: tmp_path / "map.safetensors")
    pictures = [ball(1), grass(1), stripes(1)]
    rows = torch.nn.functional.normalize(torch.randn(3, 1280), dim=1)
    pixels = [torch.frombuffer(bytearray(one.tobytes()), dtype=torch.uint8).view(128, 128, 3) for one in pictures]
    small = torch.stack([one.permute(2, 0, 1).float() / 127.5 - 1 for one in pixels])
    colours = torch.nn.functional.adaptive_avg_pool2d(small, 4).flatten(1)
    features = Features(rows, colours)
    found = PromptMap(Fixed(rows))  # type: ignore[arg-type]
    expected = torch.nn.functional.cosine_similarity(text(features.joined()), vectors[[0, 1, 1]])
    assert found.cosines(pictures, ["one", "two", "two"]) == pytest.approx(expected.tolist(), abs=2e-3)
    said = background(features.joined()).argmax(1).tolist()
    assert found.background(pictures) == [["a", "b", "c"][place] for place in said]
    with pytest.raises(ValueError, match="3 pictures and 1 sentences"):
        found.cosines(pictures, ["one"])
    assert found.knows("two") and not found.knows("three")
