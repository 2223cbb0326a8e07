"""Judges how well a built-in text-to-image model draws, beside real pictures (the ceiling) and chance (the floor).

    python -m tools.judge --model src/blockskip/builtin/flux --build build --out build/judge/flux.json

Drawn through plain diffusers: every object in both styles, on backgrounds that go round. Told by `tools.features`:
which of 100 names a picture shows (the first, or among five), which of 12 backgrounds, which of 2 styles; whether
another background in the prompt, with the same seed, is followed; and how far the features are from real pictures'.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from importlib.metadata import version
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from diffusers import DiffusionPipeline
from tqdm import tqdm

from blockskip.errors import UserError
from blockskip.store.files import write_atomically
from tools.captions import BACKGROUNDS, OBJECTS, STYLES, article
from tools.features import (
    VERSIONS_OF,
    Features,
    PictureEncoder,
    Reading,
    Scene,
    every_scene,
    fit_instrument,
    kernel_distance,
    places,
    read,
    real_features,
    recall_at,
    require_packages,
    sentence_features,
)
from tools.held_out import SUBJECT_SPRITES

DISTRACTORS = {
    "castle": "1f3f0", "volcano": "1f30b", "sofa": "1f6cb-fe0f", "alarm clock": "23f0", "hammer": "1f528",
    "key": "1f511", "bicycle": "1f6b2", "trumpet": "1f3ba", "anchor": "2693", "book": "1f4d5", "tent": "26fa",
    "top hat": "1f3a9",
}  # fmt: skip
"""Names that no model has learned and no subject bears, with their sprites; they only make the choice harder."""

SPRITES = {thing.name: thing.sprite for thing in OBJECTS} | SUBJECT_SPRITES | DISTRACTORS
"""The 100 names and their sprites."""

REAL_SEEDS = {"fit": 7001, "real": 7002, "second": 7003, "empty": 7004, "check": 7005}
"""Of real composites: to fit on, two sets like the drawn pictures, backgrounds alone, the check of the instrument."""

CHANCE = {"recall@1": 1 / len(SPRITES), "recall@5": 5 / len(SPRITES), "background": 1 / len(BACKGROUNDS)}
CHANCE |= {"style": 1 / len(STYLES), "follows": len(BACKGROUNDS) ** -2}

ROWS = {
    "recall@1": "object, first of 100 names",
    "recall@5": "object, among the first five",
    "background": "background, of 12",
    "style": "photo or flat drawing",
    "follows": "another background, followed",
    "distance": "distance to real pictures × 1000",
}
"""The figures and what the table calls them; only the last is better when lower."""


def figures(reading: Reading, scenes: list[Scene]) -> dict[str, float | None]:
    """The shares in [0, 1] of pictures that are right, by the keys of `ROWS` but the distance; None: nothing to count.

    "follows" counts pairs of one object, style and seed with two backgrounds, and those where both are recognised.
    """
    background = reading.background == places(scenes, "background", BACKGROUNDS)
    style = reading.style == places(scenes, "style", STYLES)
    groups: dict[tuple[str, str], list[bool]] = {}
    for scene, right in zip(scenes, background.tolist(), strict=True):
        groups.setdefault((scene.name, scene.style), []).append(right)
    pairs = [first and second for group in groups.values() for first, second in combinations(group, 2)]
    return {
        "recall@1": recall_at(reading.rank, 1),
        "recall@5": recall_at(reading.rank, 5),
        "background": float(background.double().mean()),
        "style": float(style.double().mean()),
        "follows": sum(pairs) / len(pairs) if pairs else None,
    }


def breakdown(reading: Reading, scenes: list[Scene]) -> dict[str, object]:
    """The figures of each object, background and style, and what the ten worst objects were taken for."""
    names = list(SPRITES)

    def part(key: str, value: str) -> dict[str, object]:
        chosen = [index for index, scene in enumerate(scenes) if getattr(scene, key) == value]
        some = Reading(*(getattr(reading, field)[chosen] for field in Reading.__dataclass_fields__))
        return {"pictures": len(chosen), **figures(some, [scenes[index] for index in chosen])}

    parts = {key: {} for key in ("name", "background", "style")}
    for key, found in parts.items():
        for value in dict.fromkeys(getattr(scene, key) for scene in scenes):
            found[value] = part(key, value)
    worst = sorted(parts["name"], key=lambda name: (parts["name"][name]["recall@1"], parts["name"][name]["recall@5"]))
    confusions = {}
    for name in worst[:10]:
        said = Counter(
            names[answer] for answer, scene in zip(reading.name.tolist(), scenes, strict=True) if scene.name == name
        )
        del said[name]
        confusions[name] = dict(sorted(said.items(), key=lambda item: (-item[1], item[0])))
    return {
        "objects": parts["name"],
        "backgrounds": parts["background"],
        "styles": parts["style"],
        "taken for": confusions,
    }


def design(objects: list[str], pictures: int) -> tuple[list[Scene], list[int]]:
    """The scenes to draw, as many for each object, and the seed of each.

    Object i has its j-th picture on background i + 5 j (mod 12), so none comes twice. The first half (at least two) has
    one style, the rest the other; which one comes first alternates. Pictures of one object and style share a seed.

    Raises:
        UserError: there are fewer pictures than objects, or more than 12 for each.
    """
    each = pictures // len(objects)
    if not 1 <= each <= len(BACKGROUNDS):
        least, most = len(objects), len(objects) * len(BACKGROUNDS)
        raise UserError(f"--pictures must be {least} to {most} for {len(objects)} objects, not {pictures}.")
    styles, backgrounds = list(STYLES), list(BACKGROUNDS)
    scenes, seeds = [], []
    for i, name in enumerate(objects):
        for j in range(each):
            style = (i + i // len(backgrounds) + j // max(2, (each + 1) // 2)) % len(styles)
            scenes.append(Scene(name, styles[style], backgrounds[(i + 5 * j) % len(backgrounds)]))
            seeds.append(len(styles) * i + style)
    return scenes, seeds


def prompt(scene: Scene) -> str:
    """The first of the style's captions, with the object and the background."""
    template = next(iter(STYLES[scene.style].templates))
    return template.format(object=article(scene.name), background=BACKGROUNDS[scene.background])


def draw(pipeline: DiffusionPipeline, prompts: list[str], seeds: list[int], call: dict, side: int) -> np.ndarray:
    """One picture for each prompt, uint8 RGB (N, side, side, 3), in batches of 24 at 64 px.

    Args:
        pipeline: any text-to-image pipeline of diffusers.
        prompts: N of them.
        seeds: of the noise, N of them.
        call: further arguments of the pipeline, as the model's `builtin.json` has them.
        side: pixels.

    Raises:
        UserError: the pictures come out in another size.
    """
    batch = max(1, 24 * 64 * 64 // side**2)
    drawn = []
    for start in tqdm(range(0, len(prompts), batch), desc=f"drawing at {side} px", leave=False):
        some = prompts[start : start + batch]
        arguments = {**call, "height": side, "width": side}
        if isinstance(call.get("negative_prompt"), str):  # FLUX wants one for each prompt; SANA takes either
            arguments["negative_prompt"] = [call["negative_prompt"]] * len(some)
        generators = [torch.Generator().manual_seed(seed) for seed in seeds[start : start + batch]]
        drawn += [
            np.asarray(image.convert("RGB")) for image in pipeline(some, generator=generators, **arguments).images
        ]
    if drawn[0].shape != (side, side, 3):
        raise UserError(f"The pipeline drew {drawn[0].shape[1]} x {drawn[0].shape[0]} px when asked for {side} px.")
    return np.stack(drawn)


def judge_size(
    pipeline: DiffusionPipeline, call: dict, objects: list[str], pictures: int, side: int, seed: int,
    build: Path, encode: PictureEncoder, text: torch.Tensor,
) -> dict[str, object]:  # fmt: skip
    """Everything that is found out at one size."""
    scenes, seeds = design(objects, pictures)

    def real(these: list[Scene], purpose: str) -> Features:
        return real_features(build, SPRITES, these, side, REAL_SEEDS[purpose], encode)

    fit_scenes = every_scene(list(SPRITES))
    instrument = fit_instrument(real(fit_scenes, "fit"), fit_scenes, list(SPRITES), text)
    check_scenes = design(list(SPRITES), 4 * len(SPRITES))[0]
    check = read(instrument, real(check_scenes, "check"), check_scenes)
    first, second = real(scenes, "real"), real(scenes, "second")
    empty = real([Scene("", scene.style, scene.background) for scene in scenes], "empty")
    started = time.monotonic()
    drawn = draw(pipeline, [prompt(scene) for scene in scenes], [seed + number for number in seeds], call, side)
    print(f"{len(scenes)} pictures of {side} px drawn in {time.monotonic() - started:.0f} s", file=sys.stderr)
    features = encode(drawn, f"drawn pictures at {side} px")

    def row(these: Features) -> dict[str, float | None]:
        distance = kernel_distance(these.image, (second if these is first else first).image)
        return figures(read(instrument, these, scenes), scenes) | {"distance": distance}

    return {
        "pictures": len(scenes),
        "drawn": row(features),
        "real": row(first),
        "floor": CHANCE | {"distance": row(empty)["distance"]},
        "backgrounds alone": row(empty),
        "instrument on fresh composites of all names": {"pictures": len(check_scenes), **figures(check, check_scenes)},
        "parts": {
            "drawn": breakdown(read(instrument, features, scenes), scenes),
            "real": breakdown(read(instrument, first, scenes), scenes),
        },
    }


def table(sizes: dict[str, dict], command: str) -> str:
    """The Markdown table of all sizes, the weakest objects, and the command that made them."""

    def cell(key: str, value: float | None) -> str:
        return "–" if value is None else f"{1000 * value:.1f}" if key == "distance" else f"{value:.3f}"

    columns = [(size, kind) for size in sizes for kind in ("drawn", "real", "floor")]
    heads = [f"{size} px: drawn" if kind == "drawn" else kind for size, kind in columns]
    lines = ["| | " + " | ".join(heads) + " |", "|---|" + "---|" * len(columns)]
    for key, title in ROWS.items():
        lines.append(f"| {title} | " + " | ".join(cell(key, sizes[size][kind][key]) for size, kind in columns) + " |")
    lines.append("")
    for size, found in sizes.items():
        weak = ", ".join(
            f"{name} ({found['parts']['drawn']['objects'][name]['recall@1']:.2f}"
            + (f", taken for {' and '.join(list(said)[:2])})" if said else ")")
            for name, said in list(found["parts"]["drawn"]["taken for"].items())[:6]
        )
        lines.append(f"{found['pictures']} pictures at {size} px; weakest, with recall of the first name: {weak}.\n")
    return "\n".join([*lines, f"Made by `{command}`."])


def markers(name: str) -> tuple[str, str]:
    """The comments around the figures of a model in a document."""
    return f"<!-- figures:{name} -->", f"<!-- /figures:{name} -->"


def replace_figures(document: str, name: str, text: str) -> str:
    """The document with `text` between the markers of the model `name`, in place of what was there.

    Raises:
        UserError: the markers are not there once each, in order.
    """
    begin, end = markers(name)
    before, _, rest = document.partition(begin)
    _, _, after = rest.partition(end)
    if document.count(begin) != 1 or document.count(end) != 1 or end not in rest:
        raise UserError(f"The document for the figures needs one line {begin} and, below it, one line {end}.")
    return f"{before}{begin}\n{text}\n{end}{after}"


def known_objects(model: Path, chosen: list[str] | None) -> tuple[dict[str, object], list[str]]:
    """The `builtin.json` of a model, and the objects to draw: those chosen, or all that it knows.

    Raises:
        UserError: the folder is no built-in model, or an object is not one of `OBJECTS`.
    """
    try:
        known = json.loads((model / "builtin.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{model} has no builtin.json, so it is not the folder of a built-in model.") from None
    objects = chosen or known["objects"]
    if strangers := sorted(set(objects) - {thing.name for thing in OBJECTS}):
        raise UserError(f"No object in tools/captions.py is called {' or '.join(strangers)}.")
    return known, objects


def main() -> None:
    """Judges one model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("src/blockskip/builtin/flux"))
    parser.add_argument("--build", type=Path, default=Path("build"), help="work folder with the fetched packages")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file of all figures")
    parser.add_argument("--markdown", type=Path, help="a document with markers, between which the table is written")
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128], help="pixels")
    parser.add_argument("--pictures", type=int, nargs="+", default=[384, 192], help="drawn at each size")
    parser.add_argument("--objects", nargs="+", help="default: all that the model knows")
    parser.add_argument("--seed", type=int, default=0, help="of the first picture's noise")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    try:
        judge(arguments)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


def judge(arguments: argparse.Namespace) -> None:
    """Draws, judges, prints the table and writes the files.

    Raises:
        UserError: something that was given, or a package, is missing; before anything is drawn.
    """
    require_packages()
    if len(arguments.pictures) != len(arguments.sizes):
        raise UserError("--pictures takes one number for each of --sizes.")
    known, objects = known_objects(arguments.model, arguments.objects)
    for pictures in arguments.pictures:
        design(objects, pictures)
    name = arguments.model.resolve().name
    if arguments.markdown:
        if not arguments.markdown.exists():
            raise UserError(
                f"{arguments.markdown} does not exist; --markdown names a document with {markers(name)[0]}."
            )
        replace_figures(arguments.markdown.read_text(encoding="utf-8"), name, "")
    torch.set_num_threads(arguments.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pipeline = DiffusionPipeline.from_pretrained(arguments.model, torch_dtype=torch.bfloat16).to(device)
    pipeline.set_progress_bar_config(disable=True)
    encode, text = PictureEncoder(device), sentence_features([f"a picture of {article(word)}" for word in SPRITES])
    sizes = {
        str(side): judge_size(
            pipeline, known["call"], objects, pictures, side, arguments.seed, arguments.build, encode, text
        )
        for side, pictures in zip(arguments.sizes, arguments.pictures, strict=True)
    }
    options = {"sizes": arguments.sizes, "pictures": arguments.pictures, "objects": arguments.objects}
    given = [f" --{key} {' '.join(json.dumps(item) for item in items)}" for key, items in options.items() if items]
    command = f"python -m tools.judge --model {arguments.model.as_posix()} --seed {arguments.seed}{''.join(given)}"
    report = {
        "command": command,
        "pipeline": type(pipeline).__name__,
        "call": known["call"],
        "seeds": {"drawn": arguments.seed, "real composites": REAL_SEEDS},
        "names": list(SPRITES),
        "versions": {package: version(package) for package in ("diffusers", *VERSIONS_OF)},
        "sizes": sizes,
    }
    shown = table(sizes, command)
    print(shown)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    document = json.dumps(report, indent=2, ensure_ascii=False) + "\n"
    write_atomically(arguments.out, lambda path: path.write_text(document, encoding="utf-8"))
    if arguments.markdown:
        document = replace_figures(arguments.markdown.read_text(encoding="utf-8"), name, shown)
        write_atomically(arguments.markdown, lambda path: path.write_text(document, encoding="utf-8"))


if __name__ == "__main__":
    main()
