"""The benchmark of int8 features: small errors of the features and of the loss, and none without int8."""

import pytest

from benchmarks import int8_features


def test_errors_are_small_and_not_zero(capsys: pytest.CaptureFixture[str]) -> None:
    figures = int8_features.main(["--models", "builtin-sana", "--pictures", "1", "--markdown"])["builtin-sana"]
    assert f"| {' | '.join(int8_features.HEADINGS)} |" in capsys.readouterr().out
    assert figures.keys() == {"front.hidden_states", "tail.residual", "loss", "gradient", "gradient, mean of all"}
    for name in ("front.hidden_states", "tail.residual"):
        assert len(figures[name]) == len(int8_features.SIGMAS)
        assert all(1e-3 < value < 0.05 for value in figures[name])
    assert all(0 < value < 0.02 for value in figures["loss"])


def test_what_is_not_changed_has_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_features, "quantize_tokens", dict)
    figures = int8_features.measured("builtin-sana", 1)
    assert figures == {"loss": [0.0] * 3, "gradient": [0.0] * 3, "gradient, mean of all": [0.0]}
