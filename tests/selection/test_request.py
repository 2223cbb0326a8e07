"""What a selection cannot be made of is told before anything is loaded or written."""

from pathlib import Path
from typing import Any

import pytest

from blockskip.errors import UserError
from blockskip.selection.job import select
from tests.selection.small import request


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"ratios": (1.0,)}, "--ratios"),
        ({"ratios": (0.01,)}, "is none"),
        ({"ratios": ()}, "--ratios is empty"),
        ({"window": 9}, "--window = 9 does not fit"),
        ({"output": Path("folder")}, "must end in .json"),
        ({"images": ("nowhere",)}, "no folder with pictures"),
        ({"images": ()}, "Give adapters of this model"),
        ({"images": (), "loras": ("nowhere",)}, "--loras"),
        ({"loras": ("a",)}, "give one of the two"),
        ({"count": 0}, "--count must be at least 1"),
        ({"ratios": (0.5, float("nan"))}, "--ratios: nan is not between 0 and 1"),
        ({"ratios": (-0.5,)}, "--ratios: -0.5 is not between 0 and 1"),
        ({"guidance_scale": -1.0}, "--guidance-scale must be a number from 0 on, not -1.0"),
        ({"guidance_scale": float("nan")}, "--guidance-scale must be a number from 0 on, not nan"),
        ({"guidance_scale": float("inf")}, "--guidance-scale must be a number from 0 on, not inf"),
        ({"prompts": ("a cat", " ")}, "--prompts has an empty one"),
        ({"caption": ""}, "--prompt is empty"),
        ({"height": 0}, "--height must be at least 1, not 0"),
        ({"width": -32}, "--width must be at least 1, not -32"),
        ({"window": -1}, "--window must be at least 0, not -1"),
        ({"height": 33}, "--height = 33 is no multiple"),
        ({"device": "gpu"}, "--device"),
        ({"dtype": "int8"}, "--dtype"),
        ({"training": {"skip.front": 2}}, "skip.front cannot be set here"),
    ],
)
def test_what_cannot_be_used_is_told_first(
    tmp_path: Path, flux_folder: Path, subjects: tuple[str, str], changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        select(request(flux_folder, tmp_path, subjects, **changes))
    assert not (tmp_path / "selection").exists()
