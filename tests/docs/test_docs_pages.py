"""Every page quotes what is in the repository, and links to what exists."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.quoted import pages, quotes, refreshed
from tests.support.checkout import ROOT

#: A link to a file, to a heading of a page, or to one of its own.
LINK = re.compile(r"\]\((?!https?://|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)")
CODE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
#: Every page that may have links, those that quote nothing among them.
LINKING = sorted({*pages(), *ROOT.glob("*.md"), *(ROOT / "benchmarks").rglob("*.md"), *(ROOT / "tests").rglob("*.md")})


def lost(page: Path, text: str) -> list[str]:
    """The links in ``text`` of ``page`` that lead to no file, or to no heading of their page."""
    found = ((page.parent / target if target else page, anchor) for target, anchor in LINK.findall(text))
    return [
        f"{target}#{anchor}"
        for target, anchor in found
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target))
    ]


@cache
def anchors(page: Path) -> set[str]:
    """The anchor of each heading: its words in lower case with hyphens; of one that is repeated, of the first."""
    headings = HEADING.findall(CODE.sub("", page.read_text(encoding="utf-8")))
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w -]", "", heading).strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_quotes_equal_their_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count("<!-- file: ") == len(quotes(text)), "a marker is followed by no code block"
    assert refreshed(text) == text, "run make docs"


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_pip_is_asked_for_is_there(page: Path) -> None:
    """No index has our packages: pages name their folders, or the libraries of an extra as the index has them."""
    for line in re.findall(r"^.*pip install .*$", page.read_text(encoding="utf-8"), re.MULTILINE):
        asked = line.partition("pip install ")[2]
        assert not re.search(r"(?<![./\w-])megatron-run-", asked), line
        folders = re.findall(r"(?<!\.)\./((?:core|plugins|cli)[\w/-]*)", asked)
        assert [each for each in folders if not (ROOT / each / "pyproject.toml").is_file()] == [], line


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert not lost(page, page.read_text(encoding="utf-8"))


def test_a_link_to_a_heading_that_moved_is_found() -> None:
    page = ROOT / "SECURITY.md"
    moved, there = (
        "[rules](docs/trust.md#rules-that-tests-hold)",
        "[rules](core/kernel/README.md#rules-that-tests-hold)",
    )
    assert lost(page, f"{moved} {there} [this](#security) [not](#nothing) [none](docs/none.md)") == [
        f"{ROOT}/docs/trust.md#rules-that-tests-hold",
        f"{page}#nothing",
        f"{ROOT}/docs/none.md#",
    ]


def test_a_stale_quote_is_found() -> None:
    page = "<!-- file: constraints.txt -->\n\n```text\ntorch==1.0\n```\n"
    assert quotes(page) == {"constraints.txt": "torch==1.0"}
    assert refreshed(page) != page
    assert refreshed(refreshed(page)) == refreshed(page)


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    linked = {(ROOT / "docs" / target).resolve() for target, _ in LINK.findall(index)}
    missing = [page.name for page in (ROOT / "docs").glob("*.md") if page.name != "index.md" and page not in linked]
    assert not missing
