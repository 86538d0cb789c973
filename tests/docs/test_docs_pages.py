"""Every page quotes what is in the repository, and links to what exists."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.consoles import Shown
from tests.docs.quoted import pages, quotes, refreshed
from tests.docs.walk import steps
from tests.support.checkout import MEMBERS, ROOT

#: A link to a file, to a heading of a page, or to one of its own.
LINK = re.compile(r"\]\((?!https?://|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)")
INDEX = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
#: The pages that the index lists, without itself.
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if page != ROOT / "docs" / "index.md"]
#: Of one task each, the first of them the last page of the path.
GUIDES = ("your-own-schedule.md", "plan-a-run.md", "failed-run.md")
CODE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
#: Every page that may have links, those that quote nothing among them.
LINKING = sorted({*pages(), *ROOT.glob("*.md"), *(ROOT / "benchmarks").rglob("*.md"), *(ROOT / "tests").rglob("*.md")})
#: What a release shows of each distribution.
PUBLISHED = {member.folder / "README.md" for member in MEMBERS}


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


def going_on(page: Path) -> Path | None:
    """The page that the last line of ``page`` leads to first, if it does."""
    last = page.read_text(encoding="utf-8").splitlines()[-1]
    found = LINK.search(last) if last.startswith("Next: ") else None
    return (page.parent / found[1]).resolve() if found else None


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
        if folders and page in PUBLISHED:
            assert line.endswith("  # in a checkout"), "its reader may have come from an index"
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
    linked = {(ROOT / "docs" / target).resolve() for target, _ in LINK.findall(INDEX)}
    assert not [page.name for page in PAGES if page not in linked]


def test_every_page_says_where_to_go_on() -> None:
    assert not [page.name for page in PAGES if not going_on(page)]


def test_the_first_pages_are_a_path_that_the_front_page_shows() -> None:
    path = LINK.findall(INDEX.partition("## Start here\n")[2].partition("\n## ")[0])
    pages_on_it = [ROOT / "docs" / target for target, _ in path]
    assert [page.name for page in pages_on_it] == ["first-run.md", "life-of-a-model.md", "more-ranks.md", GUIDES[0]]
    assert [going_on(page) for page in pages_on_it[:-1]] == pages_on_it[1:]
    front = [ROOT / target for target, _ in LINK.findall((ROOT / "README.md").read_text(encoding="utf-8"))]
    first, last = front.index(pages_on_it[0]), front.index(pages_on_it[-1])
    assert front[first : last + 1] == pages_on_it


@pytest.mark.parametrize("name", GUIDES)
def test_a_guide_names_its_task_shows_commands_and_is_short(name: str) -> None:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert re.match(r"# .+\n\nThe task: ", text)
    assert len([step for step in steps(text) if isinstance(step, Shown)]) >= 4
    assert len(re.sub(r"^<!-- file: .*?^```$", "", text, flags=re.DOTALL | re.MULTILINE).splitlines()) <= 70
