"""Splits that ship as data: the paper's, and none that a model could not have."""

import pytest

from benchmarks import selections
from blockskip.families import FAMILIES
from blockskip.method.split import Split, split_for_ratio
from blockskip.presets import presets, split_for


def test_flux_has_the_paper_s_splits() -> None:
    for ratio, split in ((0.3, Split(7, 10)), (0.4, Split(13, 10)), (0.5, Split(19, 10))):
        found, source = split_for("flux", (19, 38), ratio)
        assert found == split
        assert source is not None and "2603.20755" in source


@pytest.mark.parametrize(("model", "family"), [("builtin", "flux"), ("builtin-sana", "sana")])
def test_the_built_in_models_have_the_split_that_kept_most(model: str, family: str) -> None:
    found = selections.read(model)
    assert found["model"]["path"] == model and found["family"] == family
    split, source = split_for(family, found["blocks"], found["validation"]["ratio"])
    assert split == Split(*found["validation"]["best_by_heldout_loss"])
    assert source is not None and model in source


def test_a_model_without_a_preset_gets_the_scaled_shares() -> None:
    assert split_for("flux", (4, 20), 0.5) == (split_for_ratio(0.5, 24), None)
    assert split_for("sana", (57,), 0.5) == (split_for_ratio(0.5, 57), None)  # another family of as many blocks
    assert split_for("flux", (38, 19), 0.5)[1] is None  # other lists
    split, source = split_for("sana", (20,), 0.0)
    assert split == Split(0, 0) and source is not None  # nothing is skipped: there is nothing to measure
    with pytest.raises(ValueError, match="leaves no block"):
        split_for("flux", (1, 1), 0.9)


def test_presets_are_of_families_and_leave_blocks_to_train() -> None:
    names = {family.name for family in FAMILIES}
    assert len({(item.family, item.blocks, item.split.front + item.split.tail) for item in presets()}) == len(presets())
    for item in presets():
        assert item.family in names
        assert len(item.split.middle(sum(item.blocks))) > 0
        assert item.source
