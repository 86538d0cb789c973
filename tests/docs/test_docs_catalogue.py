"""The catalogue of plugins: what is wrong with a line by others, and the JSON that the command reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.site import catalogue as listed
from docs.site import pages
from megatron_run.contracts.plugin import COMMAND, KINDS
from megatron_run.registry.known import KNOWN, KNOWN_COMMANDS
from megatron_run_cli.reports.catalogue import read_catalogue
from tests.support.checkout import ROOT

HEAD = "kind,name,distribution,url,summary\n"
ZIGZAG = "schedule,zigzag,acme-zigzag,https://acme.example/zigzag,Stages in a zigzag\n"
OTHER = 'command,data.count,acme-count,https://acme.example/,"Counts words, and lines"\n'


def test_the_lines_by_others_are_as_they_should_be() -> None:
    assert not list(listed.faults(listed.FILE.read_text(encoding="utf-8")))


def test_kinds_are_those_of_the_kernel() -> None:
    """The check runs where nothing is installed, and so reads folders."""
    assert {folder.name for folder in (ROOT / "plugins").iterdir() if folder.is_dir()} == set(KINDS)


def test_the_example_of_the_page_is_right() -> None:
    page = (ROOT / "docs" / "plugin-authors.md").read_text(encoding="utf-8")
    (line,) = [line for line in page.splitlines() if line.startswith("schedule,")]
    assert not list(listed.faults(f"{HEAD}{line}\n"))


def test_right_lines_are_read() -> None:
    text = HEAD + OTHER + ZIGZAG
    assert not list(listed.faults(text))
    assert [each.summary for each in listed.read(text)] == ["Counts words, and lines", "Stages in a zigzag"]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "line 1: write kind,name"),
        ("kind,name\n", "line 1: write kind,name"),
        (HEAD + ZIGZAG.strip(), "end it with a line feed"),
        (HEAD + ZIGZAG + OTHER, "schedule=zigzag: sort the lines"),
        (HEAD + ZIGZAG + ZIGZAG, "schedule=zigzag is there twice"),
        (HEAD + "\n" + ZIGZAG, "line 2: 0 fields"),
        (HEAD + OTHER.replace('"', ""), "line 2: 6 fields"),
        (HEAD + ZIGZAG.replace("schedule,", "schedules,"), "no kind 'schedules'"),
        (HEAD + ZIGZAG.replace(",zigzag,", ",Zig_Zag,"), "'Zig_Zag' is no name"),
        (HEAD + ZIGZAG.replace(",zigzag,", ",zig.zag,"), "'zig.zag' is no name"),
        (HEAD + ZIGZAG.replace("acme-zigzag", "acme zigzag"), "is no distribution"),
        (HEAD + ZIGZAG.replace("https:", "http:"), "is no address"),
        (HEAD + ZIGZAG.replace("acme.example", "user:pass@acme.example"), "is no address"),
        (HEAD + ZIGZAG.replace("/zigzag", "/zigzag?x=1"), "is no address"),
        (HEAD + ZIGZAG.replace("/zigzag", "/a)[x](javascript:y"), "is no address"),
        (HEAD + ZIGZAG.replace("Stages in a zigzag", "Zigzag"), "the summary is one line"),
        (HEAD + ZIGZAG.replace("Stages in", "Stages \x1b in"), "the summary is one line"),
        (HEAD + ZIGZAG.replace("Stages", "Stages " * 20), "the summary is one line"),
        (HEAD + ZIGZAG.replace("a zigzag", "a zigzag."), "the summary is one line"),
        (HEAD + ZIGZAG.replace(",zigzag,", ",gpipe,"), "is a name of this repository"),
        (HEAD + ZIGZAG.replace("acme-zigzag", "megatron-run-engine"), "is a name of this repository"),
        (HEAD + "\n" * 6000, "more than 5000 lines"),
    ],
)
def test_a_line_that_is_wrong_is_named(text: str, fault: str) -> None:
    assert any(fault in each for each in listed.faults(text))


def test_the_published_json_has_everything_and_is_what_the_command_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "by_others", lambda: listed.read(HEAD + OTHER + ZIGZAG))
    file = tmp_path / "plugins.json"
    file.write_text(pages.catalogue(), encoding="utf-8")
    found = read_catalogue(str(file))
    names = {(each.kind, each.name) for each in found}
    assert len(names) == len(found)
    assert {(each.kind, each.name) for each in KNOWN} | {(COMMAND, name) for name in KNOWN_COMMANDS} < names
    assert [each.url for each in found if each.url] == ["https://acme.example/", "https://acme.example/zigzag"]
    assert not [each for each in found if "`" in each.summary or not each.summary]


def test_the_page_shows_what_others_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listed, "by_others", lambda: listed.read(HEAD + ZIGZAG))
    page = dict(pages.made_pages())["plugins.md"]
    assert "| schedule | [zigzag](https://acme.example/zigzag) | `acme-zigzag` | Stages in a zigzag |" in page
