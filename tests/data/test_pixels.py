"""Decoding and scaling of picture files, against values computed with numpy and Pillow by another way."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from blockskip.data import pixels
from blockskip.data.pixels import PictureCache, load_pixels, open_picture

Array = np.ndarray[Any, Any]


@pytest.fixture
def noise() -> Array:
    return np.random.default_rng(0).integers(0, 256, (11, 17, 3)).astype(np.uint8)


def smooth(height: int, width: int) -> Image.Image:
    corners = np.random.default_rng(1).integers(0, 256, (5, 6, 3)).astype(np.uint8)
    return Image.fromarray(corners).resize((width, height), Image.Resampling.BICUBIC)


def expected(image: Array) -> torch.Tensor:
    return torch.tensor(image.astype(np.float32) / np.float32(127.5) - 1).permute(2, 0, 1)


def test_pixels_are_exact_where_nothing_is_scaled(tmp_path: Path, noise: Array) -> None:
    Image.fromarray(noise).save(tmp_path / "a.png")
    loaded = load_pixels(tmp_path / "a.png", (17, 11))
    assert loaded.dtype == torch.float32
    assert loaded.is_contiguous()
    assert torch.equal(loaded, expected(noise))
    Image.fromarray(np.array([[[0, 0, 0], [255, 255, 255]]], np.uint8)).save(tmp_path / "b.png")
    assert load_pixels(tmp_path / "b.png", (2, 1)).unique().tolist() == [-1, 1]


# What a viewer does with each EXIF orientation, as array operations.
TURNS: dict[int, Callable[[Array], Array]] = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
    8: lambda a: np.rot90(a, 1),
}


@pytest.mark.parametrize("orientation", TURNS)
@pytest.mark.parametrize("kind", ["png", "tiff", "webp"])
def test_a_picture_is_turned_as_its_exif_says(tmp_path: Path, noise: Array, orientation: int, kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"a.{kind}"
    Image.fromarray(noise).save(path, exif=exif, **({"lossless": True} if kind == "webp" else {}))
    assert np.array_equal(np.asarray(open_picture(path)), TURNS[orientation](noise))


def _rgba(colour: tuple[int, int, int, int]) -> Image.Image:
    return Image.new("RGBA", (4, 4), colour)


def _palette(transparency: int | bytes) -> tuple[Image.Image, dict[str, Any]]:
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, 200, 100, 50])
    return image, {"transparency": transparency}


def _deep(value: int) -> Image.Image:
    return Image.fromarray(np.full((4, 4), value, np.uint16))


MODES: dict[str, tuple[str, Image.Image, dict[str, Any], tuple[int, int, int]]] = {
    "opaque": ("png", _rgba((200, 100, 50, 255)), {}, (200, 100, 50)),
    "transparent": ("png", _rgba((200, 100, 50, 0)), {}, (255, 255, 255)),
    "half": ("png", _rgba((200, 100, 0, 51)), {}, (244, 224, 204)),
    "webp": ("webp", _rgba((200, 100, 50, 0)), {"lossless": True}, (255, 255, 255)),
    "grey": ("png", Image.new("L", (4, 4), 77), {}, (77, 77, 77)),
    "grey, transparent": ("png", Image.new("LA", (4, 4), (77, 0)), {}, (255, 255, 255)),
    "grey, one value transparent": ("png", Image.new("L", (4, 4), 77), {"transparency": 77}, (255, 255, 255)),
    "grey, other value transparent": ("png", Image.new("L", (4, 4), 77), {"transparency": 76}, (77, 77, 77)),
    "colour, one transparent": ("png", Image.new("RGB", (4, 4), (1, 2, 3)), {"transparency": (1, 2, 3)}, (255,) * 3),
    "black": ("png", Image.new("1", (4, 4), 0), {}, (0, 0, 0)),
    "white": ("png", Image.new("1", (4, 4), 1), {}, (255, 255, 255)),
    "palette": ("png", *_palette(0), (200, 100, 50)),
    "palette, transparent": ("png", *_palette(1), (255, 255, 255)),
    "palette, half": ("png", *_palette(bytes([255, 51])), (244, 224, 214)),
    "gif, transparent": ("gif", *_palette(1), (255, 255, 255)),
    "16 bits, dark": ("png", _deep(10 * 257), {}, (10, 10, 10)),
    "16 bits, bright": ("png", _deep(65535), {}, (255, 255, 255)),
    "16 bits, tiff": ("tiff", _deep(200 * 257), {}, (200, 200, 200)),
    "16 bits, transparent": ("png", _deep(999), {"transparency": 999}, (255, 255, 255)),
    "16 bits, pgm": ("ppm", Image.fromarray(np.full((4, 4), 10 * 257, np.int32)), {}, (10, 10, 10)),
    "32 bits": ("tiff", Image.fromarray(np.full((4, 4), 2**30, np.int32)), {}, (255, 255, 255)),
    "float to 1": ("tiff", Image.fromarray(np.full((4, 4), 0.4, np.float32)), {}, (102, 102, 102)),
    "float to 255": ("tiff", Image.fromarray(np.full((4, 4), 102, np.float32)), {}, (102, 102, 102)),
    "float, no number": ("tiff", Image.fromarray(np.full((4, 4), np.nan, np.float32)), {}, (0, 0, 0)),
    "cmyk": ("tiff", Image.new("CMYK", (4, 4), (0, 255, 255, 0)), {}, (255, 0, 0)),
    "cmyk jpeg": ("jpeg", Image.new("CMYK", (8, 8), (0, 0, 0, 0)), {"quality": 100}, (255, 255, 255)),
    "ycbcr": ("jpeg", Image.new("YCbCr", (8, 8), (128, 128, 128)), {"quality": 100}, (128, 128, 128)),
    "lab": ("tiff", Image.new("LAB", (4, 4), (0, 128, 128)), {}, (0, 0, 0)),
}


@pytest.mark.parametrize("name", MODES)
def test_every_mode_becomes_rgb_on_white(tmp_path: Path, name: str) -> None:
    kind, image, options, colour = MODES[name]
    image.save(tmp_path / f"a.{kind}", **options)
    opened = open_picture(tmp_path / f"a.{kind}")
    assert opened.mode == "RGB"
    assert np.abs(np.asarray(opened, int) - colour).max() <= 1  # what JPEG and colour spaces round


def test_all_levels_of_16_bits_keep_their_place(tmp_path: Path) -> None:
    levels = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    Image.fromarray(levels).save(tmp_path / "a.png")
    grey = np.asarray(open_picture(tmp_path / "a.png"))[..., 0].ravel()
    assert np.array_equal(grey, np.floor(np.arange(65536) / 257 + 0.5))


@pytest.mark.parametrize("kind", ["gif", "webp", "png", "tiff"])
def test_of_an_animation_the_first_frame_is_taken(tmp_path: Path, kind: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue", "lime")]
    options = {"lossless": True} if kind == "webp" else {}
    frames[0].save(tmp_path / f"a.{kind}", save_all=True, append_images=frames[1:], **options)
    assert np.asarray(open_picture(tmp_path / f"a.{kind}"))[4, 4].tolist() == [255, 0, 0]


def test_scaling_is_lanczos_of_the_whole_picture(tmp_path: Path, noise: Array) -> None:
    image = smooth(60, 90)
    image.save(tmp_path / "a.png")
    for size in [(45, 30), (90, 60), (120, 80), (7, 50)]:
        reference = np.asarray(image.resize(size, Image.Resampling.LANCZOS))
        assert torch.equal(load_pixels(tmp_path / "a.png", size), expected(reference))
    other = np.asarray(image.resize((45, 30), Image.Resampling.BICUBIC))
    assert not torch.equal(load_pixels(tmp_path / "a.png", (45, 30)), expected(other))


def test_a_box_is_the_part_of_the_scaled_picture(tmp_path: Path) -> None:
    smooth(60, 90).save(tmp_path / "a.png")
    whole = load_pixels(tmp_path / "a.png", (50, 40))
    assert torch.equal(load_pixels(tmp_path / "a.png", (50, 40), (3, 5, 20, 10)), whole[:, 5:15, 3:23])
    for box in [(-1, 0, 4, 4), (0, -1, 4, 4), (47, 0, 4, 4), (0, 37, 4, 4), (0, 0, 0, 4), (0, 0, 51, 4)]:
        for load in (load_pixels, PictureCache()):
            with pytest.raises(ValueError, match="leaves"):
                load(tmp_path / "a.png", (50, 40), box)


def sizes_made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """A list that fills with the sizes of all pictures that are scaled from now on."""
    made: list[tuple[int, int]] = []
    resize = Image.Image.resize

    def noting(self: Image.Image, size: tuple[int, int], *rest: Any, **options: Any) -> Image.Image:
        made.append(size)
        if size[0] * size[1] > 2**26:
            pytest.fail(f"{size} is made as a whole")
        return resize(self, size, *rest, **options)

    monkeypatch.setattr(Image.Image, "resize", noting)
    return made


def test_a_box_of_a_huge_picture_is_scaled_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smooth(60, 90).save(tmp_path / "a.png")
    boxes = [(3, 5, 20, 10), (0, 0, 8, 8), (42, 32, 8, 8)]
    cuts = [load_pixels(tmp_path / "a.png", (50, 40), box) for box in boxes]
    beside = load_pixels(tmp_path / "a.png", (50, 40), (4, 5, 20, 10))
    monkeypatch.setattr(pixels, "LARGEST_WHOLE", 100)
    made = sizes_made(monkeypatch)
    alone = [load_pixels(tmp_path / "a.png", (50, 40), box) for box in boxes]
    for box, part in zip(boxes, alone, strict=True):
        assert torch.equal(PictureCache()(tmp_path / "a.png", (50, 40), box), part)
    assert made == [box[2:] for box in boxes] * 2
    for cut, part in zip(cuts, alone, strict=True):
        assert (cut - part).abs().max() <= 1.01 / 127.5  # a rounding of one level
    assert (cuts[0] - beside).abs().max() > 5 / 127.5


@pytest.mark.parametrize(("size", "scaled"), [((1, 5000), (512, 2_560_000)), ((5000, 1), (2_560_000, 512))])
def test_a_line_of_pixels_needs_no_gigabytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], scaled: tuple[int, int]
) -> None:
    made = sizes_made(monkeypatch)
    Image.new("RGB", size, "lime").save(tmp_path / "a.png")
    for load in (load_pixels, PictureCache()):
        part = load(tmp_path / "a.png", scaled, (scaled[0] - 512, scaled[1] - 512, 512, 512))
        assert part.shape == (3, 512, 512)
        assert [channel.unique().tolist() for channel in part] == [[-1], [1], [-1]]
    assert set(made) == {(512, 512)}


class TestPictureCache:
    @pytest.fixture
    def opened(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        names: list[str] = []

        def counting(path: Path) -> Image.Image:
            names.append(path.name)
            return open_picture(path)

        monkeypatch.setattr(pixels, "open_picture", counting)
        return names

    @pytest.fixture
    def paths(self, tmp_path: Path) -> list[Path]:
        random = np.random.default_rng(0)
        for name in "abc":
            Image.fromarray(random.integers(0, 256, (12, 10, 3)).astype(np.uint8)).save(tmp_path / f"{name}.png")
        return [tmp_path / f"{name}.png" for name in "abc"]

    def test_it_gives_what_load_pixels_gives_and_decodes_once(self, paths: list[Path], opened: list[str]) -> None:
        cache = PictureCache()
        for box in [None, (1, 2, 3, 4), (0, 0, 8, 9)]:
            for path in paths:
                kept = cache(path, (8, 9), box)
                kept_again = cache(path, (8, 9), box).mul_(2)  # the caller's to change
                assert torch.equal(kept * 2, kept_again)
        assert sorted(opened) == ["a.png", "b.png", "c.png"]
        assert all(torch.equal(cache(path, (8, 9)), load_pixels(path, (8, 9))) for path in paths)
        cache(paths[0], (9, 8))
        assert opened.count("a.png") == 3  # load_pixels and another size

    def test_it_forgets_what_was_used_longest_ago_to_stay_within_its_limit(
        self, paths: list[Path], opened: list[str]
    ) -> None:
        a, b, c = paths
        one = 3 * 8 * 9
        cache = PictureCache(limit=2 * one + 5)
        for path in (a, b, a, c):  # c takes the place of b
            cache(path, (8, 9))
            assert cache.size <= 2 * one + 5
        cache(a, (8, 9))
        assert opened == ["a.png", "b.png", "c.png"]
        cache(b, (8, 9))
        assert opened[-1] == "b.png"

    def test_what_is_larger_than_the_limit_is_loaded_and_not_kept(self, paths: list[Path], opened: list[str]) -> None:
        cache = PictureCache(limit=3 * 8 * 9 - 1)
        for _ in range(2):
            assert torch.equal(cache(paths[0], (8, 9)), load_pixels(paths[0], (8, 9)))
        assert cache.size == 0
