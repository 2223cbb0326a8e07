"""The supported architectures: one file each, found by the class name of the pipeline or of the transformer."""

from __future__ import annotations

from blockskip.errors import UserError
from blockskip.families.base import Defaults, Family, Text, stack_text
from blockskip.families.flux import Flux
from blockskip.families.qwen_image import QwenImage
from blockskip.families.sana import Sana
from blockskip.families.sd3 import StableDiffusion3

__all__ = ["FAMILIES", "Defaults", "Family", "Text", "family_of", "stack_text"]

FAMILIES: tuple[Family, ...] = (Flux(), Sana(), StableDiffusion3(), QwenImage())


def family_of(class_name: str) -> Family:
    """The family of a pipeline's or transformer's class name.

    Raises:
        UserError: no family supports the class.
    """
    for family in FAMILIES:
        if class_name in (family.pipeline_class, family.transformer_class):
            return family
    known = ", ".join(family.pipeline_class for family in FAMILIES)
    raise UserError(f'a "{class_name}" is not supported; supported are {known}.')
