"""A rule for skipped spans from a user's file, and one sentence for a file that gives none."""

from pathlib import Path

import pytest
import torch

from blockskip.errors import UserError
from blockskip.features.precompute import Input, precompute
from blockskip.features.rules import load_rule
from blockskip.loading.source import ModelSource
from blockskip.method.skipping import ConstantResidual, NoResidual
from blockskip.method.split import Split
from blockskip.store.groups import GroupStore
from tests.families.groups import CPU, GUIDANCE, capture_features, distance, forward_inputs, group, stubbed, transformer

#: Stores one number a sample, at each image token as joint streams need it: how much longer the base's tail makes the
#: state.
GAIN = '''
from __future__ import annotations
from dataclasses import dataclass
from blockskip.method.skipping import SkipRule

@dataclass
class Gain(SkipRule):
    """One factor a sample."""
    share: float = 1.0

    def tail_features(self, span_input, span_output):
        norms = [state.float().norm(dim=(1, 2), keepdim=True) for state in (span_output, span_input)]
        gain = norms[0] / norms[1]
        return {"gain": gain.expand(-1, span_output.shape[1], -1).contiguous()}

    def tail_output(self, span_input, features):
        return span_input * features["gain"] * self.share

class Other: pass
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my-rule.py"
    path.write_text(GAIN, encoding="utf-8")
    return path


def test_the_package_s_own_rules_have_names() -> None:
    residual, residual_identity = load_rule("residual")
    none, none_identity = load_rule("none")
    assert isinstance(residual, ConstantResidual)
    assert isinstance(none, NoResidual)
    assert (residual_identity, none_identity) == ("residual", "none")


def test_a_rule_from_a_file_works_from_the_store_to_the_output(source: ModelSource, tmp_path: Path, file: Path) -> None:
    rule, _ = load_rule(f"{file}:Gain")
    split, batch, store = Split(1, 2), group(source), GroupStore(tmp_path / "store")
    full = transformer(source)
    precompute(
        source, split, rule, ["ab"], lambda _: Input("ab", batch.latents, batch.noise, batch.sigma, batch.text), store,
        window_bytes=1, dtype=torch.float32, device=CPU, guidance=GUIDANCE,
    )  # fmt: skip
    features = store.read("ab")
    assert features["tail.gain"].shape[::2] == (2, 1)
    expected = capture_features(source, full, split, batch, rule)
    assert features.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in features.items())
    inputs = forward_inputs(source, batch)
    layout = source.family.layout
    entered: list[torch.Tensor] = []
    head: list[torch.Tensor] = []
    skipped = stubbed(source, split, rule)
    stub = layout.blocks(skipped.model)[-2]
    stub.register_forward_pre_hook(
        lambda _, args, kwargs: entered.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    layout.head_of(skipped.model).register_forward_pre_hook(lambda _, args: head.append(args[0]))
    with torch.no_grad():
        skipped(features, **inputs)
    image = layout.image_tokens(entered[0], features["tail.gain"].shape[1])
    assert distance(layout.image_tokens(head[0], image.shape[1]), image * features["tail.gain"]) < 1e-6


def test_the_identity_is_that_of_the_file_s_bytes_and_the_class(file: Path, tmp_path: Path) -> None:
    first = load_rule(f"{file}:Gain")[1]
    copy = tmp_path / "copy.py"
    copy.write_text(GAIN, encoding="utf-8")
    assert load_rule(f"{copy}:Gain")[1] == first
    copy.write_text(GAIN.replace("1.0", "2.0"), encoding="utf-8")
    rule, identity = load_rule(f"{copy}:Gain")
    assert identity != first
    assert rule.share == 2.0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "name", ["", "residuals", "nowhere.py:Gain", "nowhere.py", "rule.txt:Gain", ":Gain", "none:none"]
)
def test_what_is_no_rule_is_told(name: str) -> None:
    with pytest.raises(UserError, match=r'is neither "residual", "none", nor an existing "file\.py:Class"') as caught:
        load_rule(name)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("text", "class_name", "words"),
    [
        (GAIN, "Missing", "AttributeError"),
        (GAIN, "", "AttributeError"),
        (GAIN, "Other", "is no subclass of blockskip.method.skipping.SkipRule"),
        (GAIN, "SkipRule", "TypeError"),
        (GAIN.replace("def tail_output", "def tail_outputs"), "Gain", "TypeError"),
        ("def broken(:\n", "Gain", "SyntaxError"),
        ("1 / 0\n", "Gain", "ZeroDivisionError"),
        ("raise RuntimeError('one line,\\nand another')\n", "Gain", "one line, and another"),
        ("import nothing_of_this_name\n", "Gain", "ModuleNotFoundError"),
        ("raise SystemExit(3)\n", "Gain", "SystemExit"),
        ("class Gain:\n    def __init__(self, needed): pass\n", "Gain", "TypeError"),
    ],
)
def test_a_file_that_gives_no_rule_is_told_in_a_sentence(
    tmp_path: Path, text: str, class_name: str, words: str
) -> None:
    path = tmp_path / "rule.py"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load_rule(f"{path}:{class_name}")
    assert len(caught.value.problems) == 1
    assert words in caught.value.problems[0]
    assert "\n" not in caught.value.problems[0]
