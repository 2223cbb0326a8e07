"""A model that cannot be fetched: a sentence of its own for each reason, without the user's token."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from blockskip.cli import main
from tests.run.loads import Loads

httpx: Any = importlib.import_module(HfHubHTTPError.__mro__[1].__module__.partition(".")[0])  # whichever the hub uses
TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"
URL = f"https://user:{TOKEN}@hub.example/api/models/owner/name"


def response(status: int) -> Any:
    request = httpx.Request("GET", URL, headers={"authorization": f"Bearer {TOKEN}"})
    return httpx.Response(status, request=request)


FAILURES: dict[str, tuple[Callable[[], Exception], list[str]]] = {
    "gated": (lambda: GatedRepoError(f"403 for {URL}", response=response(403)), ["licence", "hf auth login"]),
    "missing": (lambda: RepositoryNotFoundError(f"404 {URL}", response=response(404)), ["no model on the hub"]),
    "no revision": (lambda: RevisionNotFoundError(f"404 {URL}", response=response(404)), ['no revision "v2"']),
    "offline": (lambda: OfflineModeIsEnabled(f"cannot reach {URL}"), ["HF_HUB_OFFLINE is set"]),
    "closed client": (lambda: RuntimeError(f"client of {URL} is closed"), ["cannot be fetched", "(RuntimeError)"]),
    "timeout": (lambda: httpx.ConnectTimeout(f"timed out: {URL}"), ["cannot be fetched from the hub"]),
}


@pytest.fixture
def told(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], str]:
    """Runs into a failure and gives the sentence it ends with."""

    def run(name: str) -> str:
        def fail(*args: Any, **kwargs: Any) -> Any:
            raise FAILURES[name][0]()

        monkeypatch.setattr(HfApi, "repo_info", fail)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        if name == "offline":
            monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        else:
            monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        command = ["train", "--model", "owner/name", "--model.revision", "v2", "--images", str(photos), "--prompt", "x"]
        with Loads() as loads:
            code = main([*command, "--output", str(tmp_path / "out")])
        out, err = capsys.readouterr()
        assert (code, out, loads.names) == (2, "", [])
        assert not (tmp_path / "out").exists()
        (line,) = err.splitlines()
        return line

    return run


@pytest.mark.parametrize("name", FAILURES)
def test_the_reason_is_told(name: str, told: Callable[[str], str]) -> None:
    sentence = told(name)
    assert sentence.startswith('blockskip: model.path = "owner/name"')
    assert sentence.endswith(".")
    for fragment in FAILURES[name][1]:
        assert fragment in sentence
    assert TOKEN not in sentence
    assert "HF_HUB_OFFLINE" in sentence or name != "offline"


def test_reasons_are_told_apart(told: Callable[[str], str]) -> None:
    assert len({told(name) for name in FAILURES}) == len(FAILURES)
