"""Draws objects on backgrounds with an exported pipeline through plain diffusers, as one labelled PNG.

python -m tools.contact_sheet --model src/blockskip/builtin/flux --out docs/images/builtin_flux.png

With `--unlabelled` the rows and columns are shuffled and have numbers instead of names; the names are printed, for
someone who has said first what is on the pictures.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from PIL import Image, ImageDraw

from tools.captions import BACKGROUNDS, STYLES, article


def draw(
    pipeline: DiffusionPipeline, prompts: list[str], seed: int, call: dict[str, object], batch: int = 24
) -> list[Image.Image]:
    """One picture for each prompt; all start from the same seed's noise sequence."""
    pictures: list[Image.Image] = []
    for start in range(0, len(prompts), batch):
        some = prompts[start : start + batch]
        generators = [torch.Generator().manual_seed(seed + start + index) for index in range(len(some))]
        negative = {"negative_prompt": [""] * len(some)} if "negative_prompt" in call else {}
        pictures += pipeline(some, generator=generators, **{**call, **negative}).images
    return pictures


def sheet(rows: list[str], columns: list[str], pictures: list[Image.Image], side: int, margin: int = 90) -> Image.Image:
    """The pictures as a grid with a label for each row and column."""
    canvas = Image.new("RGB", (margin + side * len(columns), 16 + side * len(rows)), "white")
    pen = ImageDraw.Draw(canvas)
    for x, column in enumerate(columns):
        pen.text((margin + x * side + 2, 2), column, fill="black")
    for y, row in enumerate(rows):
        pen.text((4, 16 + y * side + side // 2 - 6), row, fill="black")
        for x in range(len(columns)):
            picture = pictures[y * len(columns) + x].resize((side, side), Image.Resampling.BICUBIC)
            canvas.paste(picture, (margin + x * side, 16 + y * side))
    return canvas


def folded(rows: list[str], columns: list[str], pictures: list[Image.Image], side: int, folds: int) -> Image.Image:
    """The sheet with its rows in `folds` parts beside one another."""
    each = -(-len(rows) // folds)
    parts = [
        sheet(rows[start : start + each], columns, pictures[start * len(columns) :], side)
        for start in range(0, len(rows), each)
    ]
    canvas = Image.new("RGB", (sum(part.width for part in parts), parts[0].height), "white")
    for number, part in enumerate(parts):
        canvas.paste(part, (number * parts[0].width, 0))
    return canvas


def main() -> None:
    """Draws one sheet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("src/blockskip/builtin/flux"))
    parser.add_argument("--out", type=Path, default=Path("docs/images/builtin_flux.png"))
    parser.add_argument("--style", choices=tuple(STYLES), default="photo")
    parser.add_argument("--unlabelled", action="store_true")
    parser.add_argument("--objects", nargs="*", help="default: all")
    parser.add_argument("--backgrounds", nargs="*", default=list(BACKGROUNDS), help="short names; default: all")
    parser.add_argument("--size", type=int, help="pixels drawn; default: the model's own")
    parser.add_argument("--cell", type=int, default=80, help="pixels of one picture on the sheet")
    parser.add_argument("--folds", type=int, default=1, help="parts of the rows, beside one another")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=NUMBER", help="changes to the call, e.g. true_cfg_scale=4"
    )
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    known = json.loads((arguments.model / "builtin.json").read_text(encoding="utf-8"))
    call = known["call"]
    if arguments.size:
        call |= {"height": arguments.size, "width": arguments.size}
    for change in arguments.set:
        key, _, number = change.partition("=")
        call[key] = type(call[key])(float(number))
    pipeline = DiffusionPipeline.from_pretrained(arguments.model, torch_dtype=torch.bfloat16)
    pipeline.set_progress_bar_config(disable=True)
    objects, backgrounds = list(arguments.objects or known["objects"]), list(arguments.backgrounds)
    if arguments.unlabelled:
        random.Random(arguments.seed).shuffle(objects)
        random.Random(arguments.seed).shuffle(backgrounds)
        print("rows:", *enumerate(objects), "columns:", *enumerate(backgrounds))
    template = next(iter(STYLES[arguments.style].templates))
    prompts = [
        template.format(object=article(name), background=BACKGROUNDS[background])
        for name in objects
        for background in backgrounds
    ]
    pictures = draw(pipeline, prompts, arguments.seed, call)
    rows, columns = objects, backgrounds
    if arguments.unlabelled:
        rows, columns = [str(number) for number in range(len(rows))], [str(number) for number in range(len(columns))]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    folded(rows, columns, pictures, arguments.cell, arguments.folds).save(arguments.out)
    print(arguments.out)


if __name__ == "__main__":
    main()
