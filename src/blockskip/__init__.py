"""Personalise large text-to-image diffusion transformers on small machines with DiT-BlockSkip."""

from __future__ import annotations

import logging
from typing import Any

__version__ = "0.1.0"
__all__ = ["generate", "plan", "train"]

# diffusers imports bitsandbytes where it is installed, which warns of an inference kernel that nothing here would use.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def __getattr__(name: str) -> Any:
    """Import the public functions on first use, so that ``import blockskip`` itself stays light."""
    if name in __all__:
        from blockskip import run

        return getattr(run, name)
    raise AttributeError(f"module 'blockskip' has no attribute {name!r}")
