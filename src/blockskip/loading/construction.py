"""A model of diffusers changed between its construction and its weights, so that only what is left in it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from diffusers.utils import logging as diffusers_logging


@contextmanager
def changed_after_construction(cls: Any, change: Callable[[Any], None]) -> Iterator[None]:
    """Let ``cls.from_config`` give a changed model, so that ``from_pretrained`` never fills what was taken out of it.

    What diffusers has to say about the rest of the file is not shown.
    """
    original = cls.__dict__.get("from_config")

    def from_config(config: Any, **kwargs: Any) -> Any:
        made = original.__func__(cls, config, **kwargs) if original else super(cls, cls).from_config(config, **kwargs)
        change(made[0] if isinstance(made, tuple) else made)
        return made

    verbosity = diffusers_logging.get_verbosity()
    diffusers_logging.set_verbosity_error()
    cls.from_config = from_config
    try:
        yield
    finally:
        diffusers_logging.set_verbosity(verbosity)
        if original is None:
            del cls.from_config
        else:
            cls.from_config = original
