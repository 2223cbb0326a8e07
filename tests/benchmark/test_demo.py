"""The demonstration's subject: one for development, never one of the final test."""

import pytest

from blockskip import builtin
from blockskip.benchmark.demo import open_subject
from blockskip.errors import UserError


def test_the_demo_shows_the_dinosaur_unless_told_otherwise():
    subject = open_subject(None)
    assert subject.name == "dinosaur" and subject.name in builtin.subjects("development")
    assert len(subject.heldout) == 5 and len(list(subject.train.iterdir())) == 5
    assert len(subject.prompts) == 5 and subject.prompt == "a photo of sks animal"


@pytest.mark.parametrize("name", builtin.subjects("development"))
def test_every_subject_for_development_can_be_shown(name):
    subject = open_subject(name)
    assert subject.name == name and len(subject.heldout) == 5


@pytest.mark.parametrize("name", builtin.subjects("test"))
def test_a_subject_of_the_final_test_is_refused(name):
    with pytest.raises(UserError, match=f'--subject "{name}" is kept for the final test; there are dinosaur, '):
        open_subject(name)


def test_an_unknown_subject_is_refused():
    with pytest.raises(UserError, match=r'--subject "zebra" is not built in; there are dinosaur, '):
        open_subject("zebra")
