"""Pictures that are kept back from a training, to measure with."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path


def kept_back(count: int) -> int:
    """How many of a subject's pictures, the last ones, are kept back where no folder says so: a quarter or one."""
    return max(1, count // 4)


def split_pictures(pictures: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """(to train on, kept back), in the order given."""
    count = len(pictures) - kept_back(len(pictures))
    return list(pictures[:count]), list(pictures[count:])


def copy_pictures(pictures: Sequence[Path], target: Path) -> Path:
    """A folder that holds these pictures alone, with the text files of their captions; what else lies there goes."""
    wanted = [*pictures, *(path.with_suffix(".txt") for path in pictures if path.with_suffix(".txt").is_file())]
    target.mkdir(parents=True, exist_ok=True)
    for path in target.iterdir():
        if path.name not in {item.name for item in wanted}:
            path.unlink()
    for path in wanted:
        shutil.copyfile(path, target / path.name)
    return target
