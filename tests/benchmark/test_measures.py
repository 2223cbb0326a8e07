"""The measures can fail: swapped subjects score near the floor, the training pictures themselves near the ceiling."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from blockskip import builtin
from blockskip.benchmark import measures
from blockskip.benchmark.instruments import Instruments, encoder_names, open_instruments
from blockskip.benchmark.request import Request
from blockskip.benchmark.subjects import Prompt, Subject, builtin_subject
from blockskip.data.pictures import find_pictures
from blockskip.data.pixels import open_picture
from blockskip.evaluation.encoder import Encoder
from blockskip.evaluation.mobilenet import weights_file

NAMES = ("owl", "camera", "crab", "hibiscus")
ENCODERS = ("efficientnet", *(("mobilenet",) if weights_file() is not None else ()))


class Remembered:
    """An encoder that sees every picture once."""

    def __init__(self, encoder: Encoder) -> None:
        self.name, self._encoder, self._known = encoder.name, encoder, {}

    def embed(self, images: list[Image.Image]) -> torch.Tensor:
        if new := [image for image in images if id(image) not in self._known]:
            self._known |= {id(image): (image, row) for image, row in zip(new, self._encoder.embed(new), strict=True)}
        return torch.stack([self._known[id(image)][1] for image in images])


@pytest.fixture(scope="module")
def instruments() -> Instruments:
    opened = open_instruments(Request(encoders=ENCODERS), torch.device("cpu"))
    return replace(opened, encoders={name: Remembered(encoder) for name, encoder in opened.encoders.items()})


@pytest.fixture(scope="module")
def shown() -> Callable[[str], tuple[Subject, list[Image.Image], list[Image.Image]]]:
    """(subject, training pictures, kept-back pictures) by name."""
    found = {}
    for name in NAMES:
        subject = builtin_subject(name)
        train = [open_picture(path) for path in find_pictures(Path(subject.train))]
        found[name] = (subject, train, [open_picture(Path(path)) for path in subject.heldout])
    return found.__getitem__


def means(images: list[Image.Image], references: list[Image.Image], instruments: Instruments) -> list[float]:
    found = measures.fidelity([[image] for image in images], {"real": references}, instruments)
    return [float(np.mean(values["real"])) for values in found.values()]


@pytest.mark.parametrize(("name", "other"), [("owl", "camera"), ("camera", "hibiscus"), ("crab", "owl")])
def test_another_subject_is_near_the_floor_and_the_training_pictures_near_the_ceiling(
    instruments: Instruments, shown: Callable, name: str, other: str
) -> None:
    """The floor here is pictures of the same backgrounds with other things on them."""
    _, train, heldout = shown(name)
    floor = np.mean([means(shown(it)[1], heldout, instruments) for it in NAMES if it not in (name, other)], axis=0)
    references = {"real": heldout}
    top = [item["real"] for item in measures.top({"real": train}, references, instruments).values()]
    swapped, copies = means(shown(other)[1], heldout, instruments), means(train, heldout, instruments)
    for place in range(len(ENCODERS)):
        span = top[place] - floor[place]
        assert span > 0.15
        assert abs(swapped[place] - floor[place]) < 0.35 * span, "another subject is not the subject"
        assert copies[place] > floor[place] + 0.9 * span, "the training pictures show the subject"


def test_the_ceiling_does_not_count_a_picture_against_itself(instruments: Instruments, shown: Callable) -> None:
    _, train, _ = shown("owl")
    own = measures.top({"real": train}, {"real": train}, instruments)["EfficientNet-Lite0"]["real"]
    assert own < 0.999 and own == pytest.approx(
        (means(train, train, instruments)[0] * len(train) - 1) / (len(train) - 1), abs=1e-5
    )


def test_a_prompt_is_told_from_other_prompts(instruments: Instruments, shown: Callable) -> None:
    subject, _, heldout = shown("crab")
    said = [Prompt("", str(text), phrase) for text, phrase in zip(
        subject.heldout_said, subject.heldout_backgrounds, strict=True)]  # fmt: skip
    rows = [[image] for image in heldout]
    right = measures.prompt_fidelity(rows, said, instruments)
    moved = said[1:] + said[:1]
    other = [Prompt("", str(text)) for text in shown("camera")[0].heldout_said]
    assert right is not None and np.mean(right) > 0.7
    for wrong in (moved, other):
        found = measures.prompt_fidelity(rows, wrong, instruments)
        assert found is not None and np.mean(found) < np.mean(right) - 0.15
    assert np.mean(measures.backgrounds(rows, said, instruments)) == 1  # type: ignore[arg-type]
    assert np.mean(measures.backgrounds(rows, moved, instruments)) == 0  # type: ignore[arg-type]


def test_words_that_nobody_can_compare_give_no_figure(instruments: Instruments, shown: Callable) -> None:
    _, _, heldout = shown("owl")
    assert measures.prompt_fidelity([heldout], [Prompt("a", "a photo of a dromedary")], instruments) is None
    assert measures.backgrounds([heldout], [Prompt("a", "a photo of an owl")], instruments) is None


def test_the_drift_is_of_the_same_prompt_and_seed(instruments: Instruments, shown: Callable) -> None:
    _, train, heldout = shown("owl")
    rows = [[image] for image in train]
    for values in measures.drift(rows, rows, instruments).values():
        assert values == pytest.approx([0.0] * len(train), abs=1e-6)
    for values in measures.drift(rows, [[image] for image in heldout], instruments).values():
        assert len(values) == len(train) and min(values) > 0.02


def test_real_pictures_are_scored_by_what_they_show(instruments: Instruments, shown: Callable) -> None:
    subject, _, heldout = shown("owl")
    found = measures.real_pictures(subject, heldout, instruments)
    assert len(found["prompt"]) == len(found["background"]) == 5 and np.mean(found["background"]) == 1


def test_without_a_name_the_encoders_are_those_that_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockskip.benchmark.instruments.weights_file", lambda: None)
    assert encoder_names(Request()) == ("efficientnet",) and encoder_names(Request(encoders=("dino",))) == ("dino",)
    monkeypatch.setattr("blockskip.benchmark.instruments.weights_file", lambda: Path("there"))
    assert encoder_names(Request()) == ("efficientnet", "mobilenet")


def test_the_map_is_of_the_built_in_models_pictures_only(tmp_path: Path) -> None:
    own = open_instruments(Request(subjects_from=str(tmp_path), encoders=("efficientnet",)), torch.device("cpu"))
    assert own.prompts is None and own.backgrounds is None


def test_every_prompt_of_every_subject_is_in_the_map(instruments: Instruments) -> None:
    assert instruments.prompts is not None
    for which in ("development", "test"):
        for name in builtin.subjects(which):
            subject = builtin_subject(name)
            words = [*(prompt.said for prompt in subject.prompts), *map(str, subject.heldout_said)]
            assert all(instruments.prompts.knows(text) and "sks" not in text for text in words)
            assert all(prompt.background is not None for prompt in subject.prompts)
