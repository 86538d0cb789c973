"""The pages that are walks are taken as they stand: each step prints what the page shows, after those before it."""

from __future__ import annotations

import shlex
import tomllib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from unittest import mock

import click
import pytest

from megatron_run.errors import ExitCode
from megatron_run_cli.main import main
from tests.docs.consoles import Shown
from tests.docs.key_tables import tables
from tests.docs.quoted import pages
from tests.docs.walk import File, Walker, steps
from tests.support.checkout import ROOT
from tests.support.fake_plugins import FakeSite

PAGES = {page.name: page.read_text(encoding="utf-8") for page in pages()}
WALKS = [name for name, page in PAGES.items() if "```shellsession\n" in page]
#: Their commands that are ours, by page: a page that is taken at night alone is read by day.
TYPED = [
    (name, step.command)
    for name in WALKS
    for step in steps(PAGES[name])
    if isinstance(step, Shown) and step.command.startswith("megatron-run ")
]


@pytest.mark.parametrize(("name", "command"), TYPED)
def test_a_command_exists_and_so_do_its_options_and_keys(name: str, command: str, site: FakeSite) -> None:
    install(name, site)
    words = shlex.split(command)[1 : -2 if " > " in command else None]
    with mock.patch.object(click.Command, "invoke", return_value=None) as ran:
        assert main(words) == ExitCode.DONE, f"{name}: {command}"
    assert ran.called
    keys = {setting.partition("=")[0] for option, setting in pairwise(words) if option == "--set"}
    assert keys <= {key.name for keys in tables().values() for key in keys}


def install(name: str, site: FakeSite) -> None:
    """Install the package that the page makes, if it makes one."""
    files = {step.name: step.text for step in steps(PAGES.get(name, "")) if isinstance(step, File)}
    if "pyproject.toml" in files:
        project = tomllib.loads(files.pop("pyproject.toml"))["project"]
        site.distribution(project["name"], project["entry-points"], requires=project["dependencies"])
        for file, text in files.items():
            (site.folder / file).write_text(text, encoding="utf-8")


def test_an_option_that_is_gone_is_found(site: FakeSite) -> None:
    with pytest.raises(AssertionError):
        test_a_command_exists_and_so_do_its_options_and_keys("page", "megatron-run zen.yaml --extent", site)
    with pytest.raises(AssertionError):
        test_a_command_exists_and_so_do_its_options_and_keys("page", "megatron-run zen.yaml --set train.rate=1", site)


@pytest.mark.nightly
@pytest.mark.multiproc
@pytest.mark.timeout(900)
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


def test_ctrl_c_is_pressed_below_the_lines_that_stand_above_it(tmp_path: Path) -> None:
    page = "```shellsession\n$ sh waits.sh\na\n...\nb\n^C\nbye\n```\n"
    # Short sleeps, since a shell that is told before it starts one is not heard until that has ended.
    waits = "trap 'echo bye; exit' INT; echo a; echo; echo b; for n in $(seq 900); do sleep 0.1; done; echo c\n"
    walk = (File("waits.sh", waits), *steps(page))
    walker = Walker(tmp_path)
    assert [walker.take(step) for step in walk] == [None] * 2


def test_a_step_finds_what_the_one_before_it_left(tmp_path: Path) -> None:
    walker = Walker(tmp_path)
    walk = (File("a", "1\n"), Shown("cp a b", ""), Shown("cat b", "1\n"))
    assert [walker.take(step) for step in walk] == [None] * 3


def test_the_steps_of_a_page_are_its_files_and_commands_in_order() -> None:
    page = "<!-- file: x/a.py -->\n\n```python\n1\n```\n\n```shellsession\n$ python a.py\n$ ls\na.py\n```\n"
    assert list(steps(page)) == [File("a.py", "1\n"), Shown("python a.py", ""), Shown("ls", "a.py\n")]
