"""Writes the average of the trained weights as a built-in model, bfloat16, with `builtin.json`.

python -m tools.export --model flux --build build
"""

import argparse
import json
from pathlib import Path

import torch

from tools.autoencoders import CLASSES
from tools.captions import BACKGROUNDS, OBJECTS, STYLES
from tools.make_tokenizers import LENGTH
from tools.model import save_pipeline
from tools.train import build_parts

STEPS, SCALE, SHIFT = 20, 3.0, 1.0
"""What draws best, chosen by eye: denoising steps, classifier-free guidance, shift of the sigmas."""

CALLS = {
    "flux": {"guidance_scale": 1.0, "true_cfg_scale": SCALE, "negative_prompt": ""},
    "sana": {"guidance_scale": SCALE, "complex_human_instruction": None, "use_resolution_binning": False},
}
"""Arguments of `FluxPipeline.__call__` and `SanaPipeline.__call__` beside the size, the steps and the text's length."""


def description(model: str, trained: dict[str, object]) -> dict[str, object]:
    """The contents of `builtin.json`; every key of "call" is an argument of the pipeline's `__call__`."""
    size = {"height": 64, "width": 64, "num_inference_steps": STEPS, "max_sequence_length": LENGTH}
    return {
        "call": {**size, **CALLS[model]},
        "resolution": 64,
        "full_resolution": 128,
        "objects": [thing.name for thing in OBJECTS],
        "backgrounds": list(BACKGROUNDS.values()),
        "styles": list(STYLES),
        "class_words": sorted({kind for thing in OBJECTS for kind in thing.kinds}),
        "trained": trained,
    }


def main() -> None:
    """Exports one checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(CALLS), default="flux")
    parser.add_argument("--build", type=Path, default=Path("build"))
    parser.add_argument("--out", type=Path, help="default: src/blockskip/builtin/MODEL")
    arguments = parser.parse_args()
    out = arguments.out or Path("src/blockskip/builtin") / arguments.model

    folder = arguments.build / arguments.model
    saved = torch.load(folder / "state.pt", map_location="cpu")
    parts = build_parts(arguments.model, arguments.build, None, **saved["configuration"])
    parts.load_state_dict(saved["parts"], strict=True)
    parts.load_state_dict(saved["average"], strict=False)
    vae = CLASSES[arguments.model].from_pretrained(folder / "vae")
    trained = {"steps": saved["step"], "pictures": saved["pictures"], "minutes": round(saved["seconds"] / 60)}
    text = json.dumps(description(arguments.model, trained), indent=2) + "\n"
    save_pipeline(parts.eval(), vae, SHIFT, out, text)
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    print(f"{out}: {size / 1e6:.1f} MB, trained {trained}")


if __name__ == "__main__":
    main()
