"""The supported architectures: one file each, found by the class name of the pipeline or of the transformer."""

from __future__ import annotations

from blockskip.errors import UserError
from blockskip.families.aura_flow import AuraFlow
from blockskip.families.base import Defaults, Family, Text, stack_text
from blockskip.families.bria import Bria
from blockskip.families.chroma import Chroma
from blockskip.families.cogview4 import CogView4
from blockskip.families.flux import Flux
from blockskip.families.flux2 import Flux2, Flux2Klein
from blockskip.families.hidream import HiDream
from blockskip.families.longcat_image import LongCatImage
from blockskip.families.lumina2 import Lumina2
from blockskip.families.ovis_image import OvisImage
from blockskip.families.pixart import PixArtAlpha, PixArtSigma
from blockskip.families.qwen_image import QwenImage
from blockskip.families.sana import Sana
from blockskip.families.sd3 import StableDiffusion3
from blockskip.families.z_image import ZImage

__all__ = ["FAMILIES", "REFUSED", "Defaults", "Family", "Text", "family_of", "stack_text"]

FAMILIES: tuple[Family, ...] = (
    Flux(), Sana(), StableDiffusion3(), QwenImage(), PixArtSigma(), PixArtAlpha(), Lumina2(), CogView4(),
    Flux2(), Flux2Klein(), Chroma(), ZImage(), AuraFlow(), HiDream(),
    LongCatImage(), OvisImage(), Bria(),
)  # fmt: skip
#: Class names of pipelines and transformers that will not be supported, and why.
REFUSED: dict[str, str] = dict.fromkeys(
    ("HunyuanDiTPipeline", "HunyuanDiT2DModel"),
    "its last blocks read what its first ones gave (long skip connections), so neither can be left out: a residual "
    "that is stored for the last blocks would give wrong gradients",
)


def family_of(class_name: str) -> Family:
    """The family of a pipeline's or transformer's class name.

    Raises:
        UserError: no family supports the class.
    """
    if class_name in REFUSED:
        raise UserError(f'a "{class_name}" cannot be supported: {REFUSED[class_name]}.')
    for family in FAMILIES:
        if class_name in (family.pipeline_class, family.transformer_class):
            return family
    known = ", ".join(family.pipeline_class for family in FAMILIES)
    raise UserError(f'a "{class_name}" is not supported; supported are {known}.')
