"""Pictures in the page hold pixels and nothing else."""

from __future__ import annotations

import base64
import io

import pytest
from PIL import Image

from blockskip.report.pictures import data_uri
from tests.evaluation.pictures import ball


def opened(uri: str) -> Image.Image:
    head, _, data = uri.partition(",")
    assert head in ("data:image/png;base64", "data:image/jpeg;base64")
    return Image.open(io.BytesIO(base64.b64decode(data)))


def test_a_small_picture_is_kept_exactly():
    assert opened(data_uri(ball(0))).tobytes() == ball(0).tobytes()


def test_a_large_picture_is_scaled_down():
    assert opened(data_uri(Image.new("RGB", (2000, 1000)))).size == (640, 320)


@pytest.mark.parametrize("size", [(64, 64), (800, 600)])
def test_no_metadata_goes_along(size):
    image = Image.new("RGB", size, "red")
    exif = image.getexif()
    exif[0x013B] = "Somebody Private"
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", exif=exif, comment=b"Somebody Private")
    image = Image.open(io.BytesIO(buffer.getvalue()))
    image.info["note"] = "Somebody Private"
    result = opened(data_uri(image))
    assert not result.getexif() and not set(result.info) - {"jfif", "jfif_version", "jfif_unit", "jfif_density"}
    assert b"Private" not in base64.b64decode(data_uri(image).partition(",")[2])


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "F"])
def test_every_mode_can_be_shown(mode):
    assert opened(data_uri(Image.new(mode, (8, 6)))).size == (8, 6)


def test_transparent_is_white_and_turned_is_turned():
    assert opened(data_uri(Image.new("RGBA", (2, 2), (9, 9, 9, 0)))).getpixel((0, 0)) == (255, 255, 255)
    image = Image.new("RGB", (4, 2))
    image.getexif()[0x0112] = 6
    assert opened(data_uri(image)).size == (2, 4)
