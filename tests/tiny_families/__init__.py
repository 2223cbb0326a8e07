"""Every supported family as the shared tests see it, one file each, by the name of its fixture."""

from tests.tiny_families import (
    aura_flow,
    bria,
    chroma,
    cogview4,
    flux,
    flux2,
    hidream,
    longcat_image,
    lumina2,
    ovis_image,
    pixart,
    qwen_image,
    sana,
    sd3,
    z_image,
)
from tests.tiny_families.base import TinyFamily

TINY: dict[str, TinyFamily] = {
    "flux": flux.TINY,
    "sana": sana.TINY,
    "sd3": sd3.TINY,
    "qwen_image": qwen_image.TINY,
    "pixart_sigma": pixart.SIGMA,
    "pixart_alpha": pixart.ALPHA,
    "lumina2": lumina2.TINY,
    "cogview4": cogview4.TINY,
    "flux2": flux2.TINY,
    "flux2_klein": flux2.KLEIN,
    "chroma": chroma.TINY,
    "z_image": z_image.TINY,
    "aura_flow": aura_flow.TINY,
    "hidream": hidream.TINY,
    "longcat_image": longcat_image.TINY,
    "ovis_image": ovis_image.TINY,
    "bria": bria.TINY,
}
#: Those that are like another one but for their pipeline: tests of the transformer run for that one alone.
ALIKE = frozenset({"pixart_alpha", "flux2_klein"})
#: Those whose blocks are LongCat-Image's but for details: the slowest tests of whole commands run for that one alone.
NEAR = frozenset({"ovis_image", "bria"})
