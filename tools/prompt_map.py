"""Fits what the benchmark tells prompts and backgrounds by, and writes it into the package.

    python -m tools.prompt_map --build build

Two ridge regressions on real composites of 100 names, two styles and 12 backgrounds at 64 and 128 px: from the features
of a picture (`tools.features`) to MiniLM's features of the sentence that describes it, and to its background. Beside
them the sentence features of every prompt of the built-in subjects, so that using the map needs no text encoder. Prints
how well it tells fresh composites.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from blockskip import builtin
from blockskip.benchmark.subjects import builtin_subject, known_backgrounds
from blockskip.errors import UserError
from blockskip.store.files import write_atomically
from tools.captions import BACKGROUNDS
from tools.features import (
    STRENGTH,
    Features,
    LinearMap,
    PictureEncoder,
    Scene,
    cosines,
    every_scene,
    fit_ridge,
    places,
    real_features,
    recall_at,
    require_packages,
    sentence_features,
)
from tools.features import ranks as ranks_of
from tools.judge import REAL_SEEDS, SPRITES, design, prompt

SIZES = (64, 128)


def sentences_of_subjects() -> list[str]:
    """What the benchmark compares pictures with: all prompts and kept-back pictures of the 24 subjects, in words."""
    found = []
    for which in ("development", "test"):
        for name in builtin.subjects(which):
            subject = builtin_subject(name)
            found += [*(item.said for item in subject.prompts), *subject.heldout_said]
    return sorted(set(found))


def flattened(name: str, fitted: LinearMap) -> dict[str, torch.Tensor]:
    """The tensors of a map by name; the weight in float16, the small ones in float32."""
    small = {"mean": fitted.mean, "spread": fitted.spread, "offset": fitted.offset}
    return {f"{name}.weight": fitted.weight.half().contiguous()} | {
        f"{name}.{key}": value.float().contiguous() for key, value in small.items()
    }


def fit(build: Path, encode: PictureEncoder) -> tuple[LinearMap, LinearMap, torch.Tensor]:
    """(map to sentence features, map to backgrounds, the mean sentence feature (384,)), fitted on both sizes."""
    scenes = every_scene(list(SPRITES))
    made = [real_features(build, SPRITES, scenes, side, REAL_SEEDS["fit"], encode) for side in SIZES]
    joined = torch.cat([features.joined() for features in made])
    distinct = list(dict.fromkeys(prompt(scene) for scene in scenes))
    text = sentence_features(distinct)
    middle = text.mean(0)
    rows = torch.tensor([distinct.index(prompt(scene)) for scene in scenes]).repeat(len(SIZES))
    backgrounds = places(scenes, "background", BACKGROUNDS).repeat(len(SIZES))
    return (
        fit_ridge(joined, (text - middle)[rows], STRENGTH),
        fit_ridge(joined, torch.eye(len(BACKGROUNDS))[backgrounds], STRENGTH),
        middle,
    )


def check(text_map: LinearMap, background_map: LinearMap, middle: torch.Tensor, features: Features,
          scenes: list[Scene]) -> dict[str, float]:  # fmt: skip
    """How well fresh composites are told: cosines with the right and with all other sentences, ranks, backgrounds."""
    distinct = list(dict.fromkeys(prompt(scene) for scene in scenes))
    scores = cosines(text_map(features.joined()), sentence_features(distinct) - middle)
    truth = torch.tensor([distinct.index(prompt(scene)) for scene in scenes])
    right = scores.gather(1, truth[:, None])
    place = ranks_of(scores, truth)
    said = background_map(features.joined()).argmax(1)
    return {
        "cosine with its sentence": float(right.mean()),
        "cosine with the others": float((scores.sum() - right.sum()) / (scores.numel() - len(right))),
        f"first of {len(distinct)} sentences": recall_at(place, 1),
        "among the first five": recall_at(place, 5),
        "background": float((said == places(scenes, "background", BACKGROUNDS)).double().mean()),
    }


def main() -> None:
    """Fits, checks and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=Path("build"), help="work folder with the fetched packages")
    parser.add_argument("--out", type=Path, default=builtin.prompt_map_path(), help="the file to write")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    try:
        require_packages()
        encode = PictureEncoder(torch.device("cpu"))
        text_map, background_map, middle = fit(arguments.build, encode)
        scenes = design(list(SPRITES), 4 * len(SPRITES))[0]
        for side in SIZES:
            fresh = real_features(arguments.build, SPRITES, scenes, side, REAL_SEEDS["check"], encode)
            print(f"{side} px: {json.dumps(check(text_map, background_map, middle, fresh, scenes))}")
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    sentences = sentences_of_subjects()
    vectors = F.normalize(sentence_features(sentences) - middle, dim=1).half()
    tensors = {**flattened("text", text_map), **flattened("background", background_map), "sentences": vectors}
    phrases = dict(zip(BACKGROUNDS, known_backgrounds(), strict=True))
    if [BACKGROUNDS[key] for key in BACKGROUNDS] != list(phrases.values()):
        raise SystemExit("The backgrounds of tools/captions.py and of the built-in model differ.")
    metadata = {"sentences": json.dumps(sentences), "backgrounds": json.dumps(list(phrases.values()))}
    write_atomically(arguments.out, lambda path: save_file(tensors, path, metadata=metadata))
    print(f"{arguments.out}: {arguments.out.stat().st_size} bytes, {len(sentences)} sentences")


if __name__ == "__main__":
    main()
