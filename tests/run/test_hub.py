"""A model that cannot be fetched: a sentence of its own for each reason, without the user's token."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import HfApi, ModelInfo
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile

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
    "no revision": (
        lambda: RevisionNotFoundError(f"404 {URL}", response=response(404)), ['no revision "v2"; take a branch']
    ),
    "offline": (lambda: OfflineModeIsEnabled(f"cannot reach {URL}"), ["HF_HUB_OFFLINE is set: unset it, or give"]),
    "no network": (lambda: httpx.ConnectError(f"no route: {URL}"), ["(ConnectError); look at the network and"]),
    "hub is down": (lambda: HfHubHTTPError(f"503 {URL}", response=response(503)), ["cannot be fetched", "try again"]),
    "closed client": (lambda: RuntimeError(f"client of {URL} is closed"), ["cannot be fetched", "(RuntimeError)"]),
    "timeout": (lambda: httpx.ConnectTimeout(f"timed out: {URL}"), ["cannot be fetched from the hub (ConnectTimeout)"]),
    "proxy": (lambda: httpx.ProxyError(f"407: {URL}"), ["cannot be fetched from the hub (ProxyError)"]),
}  # fmt: skip


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


@pytest.mark.parametrize(
    ("make", "fragment"),
    [
        (lambda: GatedRepoError(f"403 for {URL}", response=response(403)), "accept it on the model's page"),
        (lambda: LocalEntryNotFoundError(f"cannot reach {URL}"), "cannot be fetched from the hub (LocalEntryNot"),
    ],
)
def test_a_model_whose_page_is_open_and_whose_files_are_not(
    make: Callable[[], Exception], fragment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A gated model is listed to everybody; the first file is refused."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise make()

    file = RepoFile(path="model_index.json", size=1, oid="0" * 40)
    monkeypatch.setattr(HfApi, "repo_info", lambda *_, **__: ModelInfo(id="owner/listed", sha="1" * 40))
    monkeypatch.setattr(HfApi, "list_repo_tree", lambda *_, **__: [file])
    monkeypatch.setattr("huggingface_hub._snapshot_download.hf_hub_download", refuse)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert main(["generate", "--model", "owner/listed", "--prompt", "x", "--output", str(tmp_path / "drawn")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith('blockskip: model.path = "owner/listed"')
    assert fragment in line and TOKEN not in line
