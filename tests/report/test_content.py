"""What a report holds: colours, phases, and what does not fit together."""

from __future__ import annotations

import pytest
from PIL import Image

from blockskip.report.content import Column, Report
from tests.report.examples import blockskip, full, losses, plain


def test_a_column_without_training_is_grey_and_runs_take_turns():
    columns = [Column("base"), Column("a", losses=losses(0, 1)), Column("again the base"), Column("b", facts=plain())]
    assert Report("", "", [], [], columns).series == [0, 1, 0, 2]
    many = Report("", "", [], [], [Column(str(number), facts=plain()) for number in range(7)])
    assert many.series == [1, 2, 3, 4, 5, 1, 2]


def test_phases_come_in_the_order_of_the_runs():
    assert full().phases == ["encode", "precompute", "train", "preview"]
    assert [column.name for column, _ in full().runs] == ["Plain LoRA", "DiT-BlockSkip"]


def test_peaks_and_blocks():
    facts = blockskip(1000)
    assert facts.host_peak == 321 * 2**20 and facts.device_peak == 550 * 2**20
    assert facts.skipped_blocks == 6 and facts.on_device
    assert plain().skipped_blocks == 0 and not plain().on_device


def test_pictures_must_fit_the_prompts():
    with pytest.raises(ValueError, match='"mine" has pictures of 1 prompts, the report has 2'):
        Report("", "", [], ["a", "b"], [Column("mine", [[Image.new("RGB", (4, 4))]])])
