"""Writes the average of the trained weights as the built-in model, bfloat16, with `builtin.json`.

python -m tools.export --build build
"""

import argparse
import json
from pathlib import Path

import torch
from diffusers import AutoencoderKL

from tools.captions import BACKGROUNDS, OBJECTS
from tools.make_tokenizers import LENGTH
from tools.model import new_parts, save_pipeline

STEPS, TRUE_CFG_SCALE, SHIFT = 20, 3.0, 1.0
"""What draws best, chosen by eye: denoising steps, classifier-free guidance, shift of the sigmas."""


def description(trained: dict[str, object]) -> dict[str, object]:
    """The contents of `builtin.json`; every key of "call" is an argument of `FluxPipeline.__call__`."""
    return {
        "call": {
            "height": 64,
            "width": 64,
            "num_inference_steps": STEPS,
            "max_sequence_length": LENGTH,
            "guidance_scale": 1.0,
            "true_cfg_scale": TRUE_CFG_SCALE,
            "negative_prompt": "",
        },
        "resolution": 64,
        "full_resolution": 128,
        "objects": [thing.name for thing in OBJECTS],
        "backgrounds": list(BACKGROUNDS.values()),
        "class_words": sorted({kind for thing in OBJECTS for kind in thing.kinds}),
        "trained": trained,
    }


def main() -> None:
    """Exports one checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=Path("build"))
    parser.add_argument("--out", type=Path, default=Path("src/blockskip/builtin/flux"))
    arguments = parser.parse_args()

    saved = torch.load(arguments.build / "flux.pt", map_location="cpu")
    parts = new_parts(arguments.build, saved["heads"])
    parts.load_state_dict(saved["parts"], strict=True)
    parts.load_state_dict(saved["average"], strict=False)
    vae = AutoencoderKL.from_pretrained(arguments.build / "vae")
    trained = {"steps": saved["step"], "pictures": saved["pictures"], "minutes": round(saved["seconds"] / 60)}
    save_pipeline(parts.eval(), vae, SHIFT, arguments.out, json.dumps(description(trained), indent=2) + "\n")
    size = sum(file.stat().st_size for file in arguments.out.rglob("*") if file.is_file())
    print(f"{arguments.out}: {size / 1e6:.1f} MB, trained {trained}")


if __name__ == "__main__":
    main()
