"""The built-in subjects as programs ask for them: by set, the test set only by its name."""

import pytest

from blockskip import builtin


def test_subjects_are_listed_by_set_and_the_test_set_has_to_be_asked_for():
    assert builtin.subjects() == builtin.subjects("development")
    assert not set(builtin.subjects()) & set(builtin.subjects("test"))
    with pytest.raises(ValueError, match="'all'; there are development and test"):
        builtin.subjects("all")


def test_a_subject_of_either_set_has_a_folder_and_another_name_has_none():
    for name in builtin.subjects("development") + builtin.subjects("test"):
        folder = builtin.subject_path(name)
        assert folder.name == name.replace(" ", "_") and (folder / "subject.json").is_file()
    with pytest.raises(KeyError, match="'fire_engine'; for development there are dinosaur, "):
        builtin.subject_path("fire_engine")
