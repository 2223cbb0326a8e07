"""Every supported family as the shared tests see it, one file each, by the name of its fixture."""

from tests.tiny_families import flux, qwen_image, sana, sd3
from tests.tiny_families.base import TinyFamily

TINY: dict[str, TinyFamily] = {
    "flux": flux.TINY,
    "sana": sana.TINY,
    "sd3": sd3.TINY,
    "qwen_image": qwen_image.TINY,
}
