"""A model whose texts are short, for tests that run it hundreds of times."""

import json
import shutil
from pathlib import Path

from blockskip.loading.source import ModelSource, open_model

#: Text tokens; the tiny tokenizer gives a letter of a caption about one.
TEXT_LENGTH = 40


def with_short_texts(folder: Path, target: Path) -> ModelSource:
    """A copy of a tiny pipeline that says so itself."""
    shutil.copytree(folder, target)
    settings = {"full_resolution": 128, "call": {"max_sequence_length": TEXT_LENGTH}}
    (target / "builtin.json").write_text(json.dumps(settings), encoding="utf-8")
    return open_model(str(target))
