"""Every page quotes what is in the repository, and links to what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.quoted import pages, quotes, refreshed
from tests.support.checkout import ROOT

LINK = re.compile(r"\]\((?!https?://|mailto:)([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_quotes_equal_their_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count("<!-- file: ") == len(quotes(text)), "a marker is followed by no code block"
    assert refreshed(text) == text, "run make docs"


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = LINK.findall(page.read_text(encoding="utf-8"))
    assert not [target for target in targets if not (page.parent / target).exists()]


def test_a_stale_quote_is_found() -> None:
    page = "<!-- file: constraints.txt -->\n\n```text\ntorch==1.0\n```\n"
    assert quotes(page) == {"constraints.txt": "torch==1.0"}
    assert refreshed(page) != page
    assert refreshed(refreshed(page)) == refreshed(page)


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    linked = {(ROOT / "docs" / target).resolve() for target in LINK.findall(index)}
    missing = [page.name for page in (ROOT / "docs").glob("*.md") if page.name != "index.md" and page not in linked]
    assert not missing
