"""The page: everything inside it, nothing of the machine in it, and no text that can act."""

from __future__ import annotations

import getpass
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from blockskip.report import html
from blockskip.report.html import render_html, write_report
from tests.report.examples import EXAMPLES, PROMPTS, bare, full

VOID = {"meta", "img", "br", "hr", "link", "input"}


class Page(HTMLParser):
    """Every tag with its attributes, every text, and whether all tags are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).replace("\N{NO-BREAK SPACE}", " ").split())


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return {name: render_html(make()) for name, make in EXAMPLES.items()}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_page_is_whole_and_asks_for_nothing(pages, name):
    page = Page(pages[name])
    assert page.open == []
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "link", "iframe", "object", "embed", "base", "form"}
    for tag, attributes in page.tags:
        assert not [key for key in attributes if key.startswith("on")]
        if tag == "img":
            assert attributes["src"].startswith("data:image/") and attributes["alt"]
        for key in ("href", "xlink:href"):
            assert attributes.get(key, "#").startswith("#")
    css = re.search(r"<style>(.*?)</style>", pages[name], re.DOTALL)[1]
    assert "url(" not in css and "@import" not in css
    assert "default-src 'none'" in pages[name]


def test_the_whole_comparison_is_there(pages):
    page = Page(pages["full"])
    pictures = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(pictures) == 5 + 3 * len(PROMPTS) * 2
    for text in [
        *PROMPTS,
        "Base model",
        "Plain LoRA",
        "DiT-BlockSkip",
        "433 MiB (402 + 38)",
        "4 min 04 s",
        "0.709",
        "76%",
        "3 skipped at the front, 6 trained, 3 skipped at the tail",
        "all 12 trained",
    ]:
        assert text in page.text
    rows = [attributes for tag, attributes in page.tags if attributes.get("class") == "row"]
    assert len(rows) == len(PROMPTS)


@pytest.mark.parametrize(
    ("name", "absent"),
    [
        ("single", ["Subject fidelity", "device memory"]),
        ("bare", ["Same prompts", "Learned from", "Subject fidelity", "Plain LoRA"]),
    ],
)
def test_what_is_not_there_leaves_no_empty_section(pages, name, absent):
    text = Page(pages[name]).text
    assert "DiT-BlockSkip" in text and "321 MiB" in text
    assert not [words for words in absent if words in text]


def test_hostile_texts_are_shown_as_texts(pages):
    page = Page(pages["hostile"])
    for text in (
        "<script>alert(1)</script>",
        "<script>alert(4)</script>",
        "</style><script>alert(3)</script>",
        "<b>&amp;</b> {% raw %}",
        "{{ 7*7 }} _x",
        "\N{DOG FACE}",
    ):
        assert text in page.text
    assert not re.search("[\x00-\x08\x0b-\x1f\u202e\ud800-\udfff]", pages["hostile"])
    assert [tag for tag, _ in page.tags].count("title") == 1


def test_nothing_of_the_machine_is_in_the_page(pages):
    for text in pages.values():
        visible = re.sub(r"data:image/[^\"]+", "", text)
        assert "somebody" not in visible and "/home" not in visible
        assert str(Path.home()) + os.sep not in visible and str(Path.cwd()) not in visible
        if len(getpass.getuser()) > 4:
            assert getpass.getuser() not in visible
    assert "images = &#34;rex&#34;" in pages["full"]


def test_writing_is_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "new" / "report.html"
    write_report(bare(), path)
    written = path.read_text(encoding="utf-8")
    assert written == render_html(bare())
    monkeypatch.setattr(html, "render_html", lambda report: "cut \ud800")
    with pytest.raises(UnicodeEncodeError):
        write_report(full(), path)
    assert path.read_text(encoding="utf-8") == written
    assert [entry.name for entry in path.parent.iterdir()] == ["report.html"]


def test_the_same_report_gives_the_same_bytes(pages):
    assert render_html(full()) == pages["full"]
