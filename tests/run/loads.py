"""Notes every model and weights file that is opened."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

from diffusers import ModelMixin
from transformers import PreTrainedModel

from blockskip.loading.weights import Weights


class Loads:
    """While it is entered, ``names`` grows by the class or folder of everything that is read."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __enter__(self) -> "Loads":
        self._patches = ExitStack()
        for base in (ModelMixin, PreTrainedModel):
            self._patches.enter_context(patch.object(base, "from_pretrained", self._watched(base)))
        original = Weights.__init__

        def init(weights: Weights, folder: Path) -> None:
            self.names.append(folder.name)
            original(weights, folder)

        self._patches.enter_context(patch.object(Weights, "__init__", init))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def _watched(self, base: type) -> Any:
        original = base.__dict__["from_pretrained"].__func__

        def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
            self.names.append(cls.__name__)
            return original(cls, *args, **kwargs)

        return classmethod(from_pretrained)
