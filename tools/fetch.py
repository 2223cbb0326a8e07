"""Fetches the picture packages by name and version from the npm registry, with the `npm` program, into a work folder.

python -m tools.fetch --build build
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

PACKAGES = (
    "@lobehub/fluent-emoji-3d@1.1.0",
    "@lobehub/fluent-emoji-flat@1.1.0",
    "@lobehub/fluent-emoji-modern@1.0.0",
    "@lobehub/fluent-emoji-anim-1@1.0.0",
    "@lobehub/fluent-emoji-anim-2@1.0.0",
    "@lobehub/fluent-emoji-anim-3@1.0.0",
    "@lobehub/fluent-emoji-anim-4@1.0.0",
)
"""The objects, shaded and flat, and what the subjects are made of: a third rendering and the animated sprites."""


def main() -> None:
    """Fetches the packages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=Path("build"), help="work folder; git ignores `build/`")
    arguments = parser.parse_args()
    npm = shutil.which("npm")
    if npm is None:
        sys.exit("The program `npm` is needed to fetch the pictures and was not found: install Node.js with npm.")
    arguments.build.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [npm, "install", "--prefix", str(arguments.build), "--no-save", "--ignore-scripts", *PACKAGES], check=True
    )


if __name__ == "__main__":
    main()
