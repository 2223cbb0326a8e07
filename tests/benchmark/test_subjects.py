"""The subjects of a benchmark: the package's own, and folders in DreamBooth's layout."""

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image

from blockskip import builtin
from blockskip.benchmark.request import Request
from blockskip.benchmark.subjects import IDENTIFIER, PROMPTS, Subject, class_of, in_words, subjects
from blockskip.data.kept import kept_back
from blockskip.errors import UserError


def put(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        Image.new("RGB", (64, 48), (20 * number, 90, 30)).save(folder / name)
    return folder


def own(root: Path, **changes: object) -> Request:
    return Request(**{"subjects_from": str(root / "data"), "output": str(root / "out"), "count": None, **changes})


def test_the_packages_subjects_come_in_their_order_and_the_tests_only_when_asked_for() -> None:
    assert [subject.name for subject in subjects(Request(count=3))] == ["dinosaur", "parrot", "unicorn"]
    assert [subject.name for subject in subjects(Request(subjects=("owl", "crab")))] == ["owl", "crab"]
    assert subjects(Request(count=None, which="test"))[0].name == "dragon"
    with pytest.raises(UserError, match='--subjects "dragon" is not of the development set; there are dinosaur'):
        subjects(Request(subjects=("dragon",)))
    for subject in subjects(Request(count=None)):
        assert len(subject.heldout) == len(subject.heldout_said) == 5 and len(subject.prompts) == 8
        assert Subject.from_json(json.loads(json.dumps(subject.as_json()))) == subject


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("a photo of sks animal in the snow", "a photo of an owl in the snow"),
        ("a photo of a small sks animal on the sea", "a photo of a small owl on the sea"),
        ("a photo of sks animal on the left at sunset", "a photo of an owl on the left at sunset"),
        ("a photo of a dog", "a photo of a dog"),
    ],
)
def test_a_prompt_in_words_names_the_subject(prompt: str, words: str) -> None:
    assert in_words(prompt, "animal", "owl") == words


def test_a_folder_of_ones_own_keeps_back_its_last_pictures(tmp_path: Path) -> None:
    put(tmp_path / "data" / "red_dog6", *(f"{number}.jpg" for number in range(5)))
    (tmp_path / "data" / "red_dog6" / "1.txt").write_text("sks red dog asleep")
    put(tmp_path / "data" / "cat", *(f"{number}.png" for number in range(8)))
    cat, dog = subjects(own(tmp_path))
    assert (cat.name, dog.name) == ("cat", "red_dog6") and dog.caption == "a photo of sks red dog"
    assert [Path(path).name for path in dog.heldout] == ["4.jpg"] and len(cat.heldout) == 2
    assert sorted(path.name for path in Path(dog.train).iterdir()) == ["0.jpg", "1.jpg", "1.txt", "2.jpg", "3.jpg"]
    assert [prompt.text for prompt in dog.prompts] == [text.replace("{}", "sks red dog") for text in PROMPTS]
    assert all(IDENTIFIER not in prompt.said and prompt.background is None for prompt in dog.prompts)
    (tmp_path / "data" / "red_dog6" / "0.jpg").unlink()
    changed = subjects(own(tmp_path))[1]
    assert sorted(path.name for path in Path(changed.train).iterdir()) == ["1.jpg", "1.txt", "2.jpg", "3.jpg"]
    assert changed.identity() != dog.identity() or dog.identity()["train"] == changed.identity()["train"]


def test_what_a_subject_is_known_by_are_its_pictures_and_words_and_no_path(tmp_path: Path) -> None:
    put(tmp_path / "data" / "cat", "a.png", "b.png", "c.png")
    first = subjects(own(tmp_path))[0].identity()
    shutil.copytree(tmp_path / "data", tmp_path / "elsewhere" / "data")
    assert subjects(own(tmp_path / "elsewhere"))[0].identity() == first
    assert str(tmp_path) not in json.dumps(first)
    Image.new("RGB", (64, 48), "white").save(tmp_path / "data" / "cat" / "c.png")
    assert subjects(own(tmp_path))[0].identity() != first
    assert subjects(own(tmp_path / "elsewhere", caption="sks {}"))[0].identity() != first


def test_prompts_and_kept_back_pictures_can_be_ones_own(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "teapot"
    put(folder / "train", "a.png", "b.png")
    put(folder / "heldout", "c.png", "d.png")
    (tmp_path / "data" / "prompts.txt").write_text("{} on a hill\n\n# none\n{} at night\n")
    (subject,) = subjects(own(tmp_path))
    assert subject.train == str(folder / "train") and len(subject.heldout) == 2
    assert [prompt.said for prompt in subject.prompts] == ["teapot on a hill", "teapot at night"]
    (folder / "prompts.txt").write_text("the {}")
    assert [prompt.text for prompt in subjects(own(tmp_path))[0].prompts] == ["the sks teapot"]


def test_folders_that_cannot_be_used_are_told_all_at_once(tmp_path: Path) -> None:
    put(tmp_path / "data" / "one", "a.png", "b.png")
    put(tmp_path / "data" / "two")
    with pytest.raises(UserError, match="too few pictures") as told:
        subjects(own(tmp_path))
    assert len(told.value.problems) == 2
    put(tmp_path / "data" / "one", "c.png")
    (tmp_path / "data" / "prompts.txt").write_text("a hill\n")
    with pytest.raises(UserError, match=r'every prompt needs a \{\} where the subject stands; "a hill" has none'):
        subjects(own(tmp_path, subjects=("one",)))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no folder"):
        subjects(own(tmp_path, subjects_from=str(tmp_path / "empty")))


@pytest.mark.parametrize(("folder", "name"), [("dog6", "dog"), ("red_cartoon", "red cartoon"), ("42", "42")])
def test_a_folders_name_says_what_its_subject_is(folder: str, name: str) -> None:
    assert class_of(folder) == name


@pytest.mark.parametrize(("count", "kept"), [(3, 1), (4, 1), (6, 1), (8, 2), (12, 3)])
def test_a_quarter_is_kept_back_and_at_least_one(count: int, kept: int) -> None:
    assert kept_back(count) == kept


def test_nothing_is_written_into_the_package() -> None:
    folder = Path(subjects(Request(count=1))[0].train)
    assert folder.is_relative_to(builtin.subject_path("dinosaur"))
