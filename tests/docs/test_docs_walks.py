"""The pages that are walks are taken as they stand: each step prints what the page shows, after those before it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.docs.consoles import Shown
from tests.docs.quoted import pages
from tests.docs.walk import File, Walker, steps
from tests.support.checkout import ROOT

PAGES = {page.name: page.read_text(encoding="utf-8") for page in pages()}
WALKS = [name for name, page in PAGES.items() if "```shellsession\n" in page]


@pytest.mark.nightly
@pytest.mark.multiproc
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", WALKS)
def test_every_step_does_what_the_page_shows(name: str, tmp_path: Path) -> None:
    walker = Walker(tmp_path)
    for step in steps(PAGES[name]):
        printed = walker.take(step)
        assert printed is None, f"{step}\nprinted:\n{printed}"
    for picture in walker.folder.glob("*.svg"):
        shown = ROOT / "docs" / "images" / f"schedule-{picture.name}"
        assert picture.read_bytes() == shown.read_bytes(), f"the page shows another picture: {shown}"


def test_another_output_is_found(tmp_path: Path) -> None:
    walker, step = Walker(tmp_path), Shown("echo passed in 2.5s; echo b", "passed in 1.0s\nb\n")
    assert walker.take(step) is None
    assert walker.take(replace(step, output="passed in 1.0s\nc\n")) == "passed in 2.5s\nb\n"


def test_a_step_finds_what_the_one_before_it_left(tmp_path: Path) -> None:
    walker = Walker(tmp_path)
    walk = (File("a", "1\n"), Shown("cp a b", ""), Shown("cat b", "1\n"))
    assert [walker.take(step) for step in walk] == [None] * 3


def test_the_steps_of_a_page_are_its_files_and_commands_in_order() -> None:
    page = "<!-- file: x/a.py -->\n\n```python\n1\n```\n\n```shellsession\n$ python a.py\n$ ls\na.py\n```\n"
    assert list(steps(page)) == [File("a.py", "1\n"), Shown("python a.py", ""), Shown("ls", "a.py\n")]
