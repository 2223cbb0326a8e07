"""Pictures as data URIs: small enough for one page, and with nothing in them but pixels."""

from __future__ import annotations

import base64
import io

from PIL import Image, ImageOps

#: Up to this many pixels on the long side a picture is stored as it is (PNG); a larger one is scaled down and JPEG.
LOSSLESS, LARGEST = 256, 640


def data_uri(image: Image.Image) -> str:
    """The picture, RGB on white, turned as its EXIF says; no EXIF, comment or other metadata goes along."""
    turned = ImageOps.exif_transpose(image).convert("RGBA")
    clean = Image.new("RGB", turned.size, "white")
    clean.paste(turned, mask=turned)
    buffer = io.BytesIO()
    if max(clean.size) <= LOSSLESS:
        kind = "png"
        clean.save(buffer, "PNG", optimize=True)
    else:
        kind = "jpeg"
        clean.thumbnail((LARGEST, LARGEST), Image.Resampling.LANCZOS)
        clean.save(buffer, "JPEG", quality=90, optimize=True)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
