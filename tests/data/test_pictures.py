"""Folders of pictures: what is found, how it is captioned, and one sentence for everything that is wrong."""

import shutil
import sys
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from blockskip.data.pictures import Picture, find_pictures, read_pictures
from blockskip.data.sizes import scaled_size
from blockskip.errors import UserError
from blockskip.keys import file_sha256


def paint(path: Path, size: tuple[int, int] = (24, 16), colour: str = "red") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = {".tif": "TIFF", ".tiff": "TIFF", ".jpg": "JPEG", ".jpeg": "JPEG"}.get(path.suffix.lower())
    Image.new("RGB", size, colour).save(path, kind or path.suffix[1:].upper().replace("HEIC", "PNG"))
    return path


def read(folder: Path | str, prompt: str | None = "a dog", **options: object) -> list[Picture]:
    return read_pictures(folder, prompt, resolution=8, full_resolution=16, **options)  # type: ignore[arg-type]


def problems_of(folder: Path | str, prompt: str | None = "a dog", **options: object) -> list[str]:
    with pytest.raises(UserError) as caught:
        read(folder, prompt, **options)
    return caught.value.problems


def test_pictures_are_found_by_extension_in_order_of_name(tmp_path: Path) -> None:
    names = ["B.JPG", "a.jpeg", "c.PNG", "d.webp", "e.bmp", "f.tif", "g.TIFF", "h.Gif", "i.avif"]
    if ".avif" not in Image.registered_extensions():
        names.remove("i.avif")
    for name in names:
        paint(tmp_path / name)
    for name in ["._a.jpeg", ".hidden.png", "__MACOSX/a.png", "below/z.png"]:
        paint(tmp_path / name)
    (tmp_path / "folder.png").mkdir()
    for name in ["Thumbs.db", "README", "notes.md", "a.txt"]:
        (tmp_path / name).write_text("no picture")
    assert [path.name for path in find_pictures(tmp_path)] == sorted(names)
    assert [picture.path.name for picture in read(tmp_path)] == sorted(names)


def test_a_picture_says_what_it_is(photos: Path) -> None:
    pictures = read_pictures(photos, " a photo of sks dog\n", resolution=64, full_resolution=96)
    assert [picture.path.name for picture in pictures] == ["1.png", "2.jpg", "3.png", "4.png", "5.jpg"]
    assert [picture.size for picture in pictures] == [(128, 96), (96, 128), (160, 160), (200, 104), (110, 150)]
    assert [picture.scaled for picture in pictures] == [(128, 96), (96, 128), (96, 96), (185, 96), (96, 131)]
    assert [picture.sha256 for picture in pictures] == [file_sha256(picture.path) for picture in pictures]
    assert {(picture.caption, picture.is_class) for picture in pictures} == {("a photo of sks dog", False)}
    assert all(picture.is_class for picture in read(photos, is_class=True))


def test_a_caption_file_has_the_whole_stem_of_its_picture(tmp_path: Path) -> None:
    for name in ["aaa.bbb.jpg", "aaa.ccc.jpg", "aaa.jpg", "Ünï çødé 狗.png", "upper.png", "bare.png"]:
        paint(tmp_path / name)
    (tmp_path / "aaa.bbb.txt").write_bytes("\ufeff  un été, 狗 \r\n".encode())
    (tmp_path / "aaa.ccc.txt").write_text("second", encoding="utf-8")
    (tmp_path / "Ünï çødé 狗.txt").write_text("third", encoding="utf-8")
    (tmp_path / "upper.TXT").write_text("fourth", encoding="utf-8")
    (tmp_path / "README.txt").write_text("of nothing", encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        captions = {picture.path.name: picture.caption for picture in read(tmp_path, "prompt")}
    assert captions == {
        "aaa.bbb.jpg": "un été, 狗",
        "aaa.ccc.jpg": "second",
        "aaa.jpg": "prompt",
        "Ünï çødé 狗.png": "third",
        "upper.png": "fourth",
        "bare.png": "prompt",
    }


def test_an_empty_caption_file_is_the_empty_caption_and_is_warned_about(tmp_path: Path) -> None:
    paint(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.warns(UserWarning, match=r"a\.txt.*empty"):
        assert [picture.caption for picture in read(tmp_path, None)] == [""]


def test_a_caption_file_of_two_pictures_is_used_and_warned_about(tmp_path: Path) -> None:
    paint(tmp_path / "same.png", colour="red")
    paint(tmp_path / "same.jpg", colour="blue")
    (tmp_path / "same.txt").write_text("both")
    with pytest.warns(UserWarning, match=r"same\.txt.*same\.jpg.*same\.png"):
        pictures = read(tmp_path)
    assert [picture.caption for picture in pictures] == ["both", "both"]
    assert len({picture.sha256 for picture in pictures}) == 2


def test_an_empty_prompt_is_a_caption(tmp_path: Path) -> None:
    paint(tmp_path / "a.png")
    assert read(tmp_path, "")[0].caption == ""


def test_all_problems_come_at_once_and_name_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = {
        "torn.jpg": "damaged or incomplete",
        "cut.png": "damaged or incomplete",
        "page.jpg": "not a picture",
        "empty.png": "not a picture",
        "bomb.png": "too large",
        "gone.png": "cannot be opened",
        "bytes.txt": "not UTF-8",
        "utf16.txt": "not UTF-8",
        "wide.txt": "not UTF-8",
        "bare.png": "data.prompt",
    }
    noise = Image.effect_noise((64, 64), 90)
    for name in ["torn.jpg", "cut.png"]:
        noise.save(tmp_path / name)
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[: len(content) * 2 // 3])
    (tmp_path / "page.jpg").write_text("<html>not found</html>")
    (tmp_path / "empty.png").touch()
    paint(tmp_path / "bomb.png", (200, 200))
    try:
        (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere.png")
    except OSError:  # Windows without the right to make links
        del bad["gone.png"]
    for name in ["bytes.png", "utf16.png", "wide.png", "bare.png", "good.png"]:
        paint(tmp_path / name)
    (tmp_path / "bytes.txt").write_bytes("été".encode("latin-1"))
    (tmp_path / "utf16.txt").write_text("a dog", encoding="utf-16")
    (tmp_path / "wide.txt").write_bytes("a dog".encode("utf-16-le"))
    for name in ["torn", "cut", "page", "empty", "bomb", "gone", "good"]:
        (tmp_path / f"{name}.txt").write_text("fine")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10_000)
    problems = problems_of(tmp_path, None)
    assert len(problems) == len(bad)
    for name, reason in bad.items():
        assert [reason in problem for problem in problems if f'{name}"' in problem] == [True]
    assert all(problem.endswith(".") for problem in problems)


def test_what_is_wrong_with_a_folder_names_the_key(tmp_path: Path) -> None:
    file = paint(tmp_path / "file.png")
    (tmp_path / "empty").mkdir()
    paint(tmp_path / "nested" / "below" / "a.png")
    (tmp_path / "nested" / "notes.md").touch()
    for folder, reason in [
        ("", "not set"),
        (tmp_path / "missing", "does not exist"),
        (file, "is a file"),
        (tmp_path / "empty", "empty folder"),
        (tmp_path / "nested", "holds no pictures"),
    ]:
        problem = problems_of(folder, key="data.class_images")
        assert len(problem) == 1
        assert problem[0].startswith("data.class_images")
        assert reason in problem[0]
        assert str(folder) in problem[0]


def test_pictures_without_caption_are_named_in_one_sentence_with_the_key(tmp_path: Path) -> None:
    for number in range(8):
        paint(tmp_path / f"{number}.png")
    (problem,) = problems_of(tmp_path, None, prompt_key="data.class_prompt")
    assert "data.class_prompt" in problem
    assert '"4.png" and 3 more' in problem


def test_a_kind_that_needs_a_package_is_read_when_it_is_there_and_named_when_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paint(tmp_path / "IMG_1.HEIC")
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    known = {name: kind for name, kind in Image.registered_extensions().items() if name != ".heic"}
    monkeypatch.setattr(Image, "registered_extensions", lambda: known)
    assert find_pictures(tmp_path) == []
    (problem,) = problems_of(tmp_path)
    assert "IMG_1.HEIC" in problem
    assert "pillow-heif" in problem
    known[".heic"] = "PNG"
    assert [picture.path.name for picture in read(tmp_path)] == ["IMG_1.HEIC"]


def test_a_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paint(tmp_path / "pictures" / "a.png")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert len(read("~/pictures")) == 1


def test_one_changed_pixel_or_a_copy_shows_in_the_hash(tmp_path: Path) -> None:
    first = paint(tmp_path / "a" / "1.png")
    copied = tmp_path / "b" / "2.png"
    copied.parent.mkdir()
    shutil.copy(first, copied)
    before = read(tmp_path / "a")[0].sha256
    assert read(tmp_path / "b")[0].sha256 == before
    image = Image.open(first).copy()
    image.putpixel((3, 3), (254, 0, 0))
    image.save(first)
    assert read(tmp_path / "a")[0].sha256 != before


@given(
    size=st.tuples(st.integers(1, 9000), st.integers(1, 9000)),
    resolution=st.sampled_from([8, 64, 100, 512]),
    more=st.sampled_from([0, 8, 512, 1000]),
)
def test_scaled_size(size: tuple[int, int], resolution: int, more: int) -> None:
    full = resolution + more
    scaled = scaled_size(size, resolution, full)
    assert min(scaled) == max(resolution, min(full, min(size)))
    assert scaled.index(min(scaled)) == size.index(min(size)) or scaled[0] == scaled[1]
    scale = min(scaled) / min(size)
    assert all(abs(after - before * scale) <= 0.5 for after, before in zip(scaled, size, strict=True))
    if resolution <= min(size) <= full:
        assert scaled == size
