"""Plugins by others: one line each in plugins/by-others.csv, which the catalogue shows beside those of this repository.

``python -m docs.site.catalogue`` checks that file, and needs nothing but Python: a workflow runs it first.
"""

from __future__ import annotations

import csv
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = ROOT / "plugins" / "by-others.csv"
#: Lines of the file, and characters of a summary.
LONGEST, SUMMARY = 5000, (10, 100)
_WORD = "[a-z0-9]+(-[a-z0-9]+)*"
_NAME, _COMMAND = re.compile(_WORD), re.compile(rf"{_WORD}(\.{_WORD})*")
_URL = re.compile(r"https://[a-z0-9-]+(\.[a-z0-9-]+)+(/[A-Za-z0-9._~-]+)*/?")


@dataclass(frozen=True)
class Listed:
    """A plugin, or a command, of a distribution that others publish, and what it does."""

    kind: str
    name: str
    distribution: str
    url: str
    summary: str

    @property
    def place(self) -> tuple[str, str, str]:
        """By what lines are sorted, and which no two share."""
        return self.kind, self.name, self.distribution


_HEAD = [each.name for each in fields(Listed)]


def by_others() -> list[Listed]:
    """The lines of the file, which the check has found right."""
    return read(FILE.read_text(encoding="utf-8"))


def read(text: str) -> list[Listed]:
    """The lines of ``text`` that have all fields, without the head."""
    rows = list(csv.reader(text.split("\n")))
    return [Listed(*row) for row in rows[1:] if len(row) == len(_HEAD)]


def faults(text: str) -> Iterator[str]:
    """What is wrong with ``text``, the whole file: a line each, with what to write."""
    rows = list(csv.reader(text.split("\n")))
    if len(rows) > LONGEST:
        yield f"more than {LONGEST} lines"
        return
    if not rows or rows[0] != _HEAD:
        yield f"line 1: write {','.join(_HEAD)}"
    if rows[-1:] != [[]]:
        yield f"line {len(rows)}: end it with a line feed"
    for number, row in enumerate(rows[1:-1], 2):
        if len(row) != len(_HEAD):
            yield f"line {number}: {len(row)} fields; write {','.join(_HEAD)}, with quotes around a field with a comma"
        else:
            yield from (f"line {number}: {fault}" for fault in _faults(Listed(*row)))
    places = [each.place for each in read(text)]
    if places != sorted(places):
        wrong = next(each for each, right in zip(places, sorted(places), strict=True) if each != right)
        yield f"{'='.join(wrong[:2])}: sort the lines by kind, name and distribution"
    yield from (f"{'='.join(each[:2])} is there twice" for each in sorted({p for p in places if places.count(p) > 1}))


def _faults(listed: Listed) -> Iterator[str]:
    kinds = {*(folder.name for folder in (ROOT / "plugins").iterdir() if folder.is_dir()), "command"}
    if listed.kind not in kinds:
        yield f"there is no kind {listed.kind!r}; kinds are {', '.join(sorted(kinds))}"
    if not (_COMMAND if listed.kind == "command" else _NAME).fullmatch(listed.name):
        yield f"{listed.name!r} is no name: write that of its entry point, lower case with hyphens"
    if not _NAME.fullmatch(listed.distribution):
        yield f"{listed.distribution!r} is no distribution: write it in lower case with hyphens"
    if not _URL.fullmatch(listed.url):
        yield f"{listed.url!r} is no address: write https://HOST/PATH, without a query"
    least, most = SUMMARY
    if not (least <= len(listed.summary) <= most and listed.summary.isprintable()) or listed.summary[-1:] in ".| ":
        yield f"the summary is one line of {least} to {most} characters, without a full stop"
    ours = dict(_ours())
    if (listed.kind, listed.name) in ours or listed.distribution in ours.values():
        yield f"{listed.kind}={listed.name} of {listed.distribution} is a name of this repository"


def _ours() -> Iterator[tuple[tuple[str, str], str]]:
    """Kind and name of each plugin and command of this repository, and the distribution."""
    for pattern in ("core/*/pyproject.toml", "plugins/*/*/pyproject.toml"):
        for file in sorted(ROOT.glob(pattern)):
            project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
            for group, points in project.get("entry-points", {}).items():
                for name in points:
                    yield (group.removeprefix("megatron_run."), name), project["name"]


def rows() -> Iterator[tuple[str, ...]]:
    """For the page: kind, name and address, distribution, summary."""
    for each in by_others():
        kind, name, distribution, url, summary = astuple(each)
        yield kind, f"[{name}]({url})", f"`{distribution}`", summary


if __name__ == "__main__":
    found = [f"{FILE.relative_to(ROOT)}: {fault}\n" for fault in faults(FILE.read_text(encoding="utf-8"))]
    sys.stderr.writelines(found)
    sys.exit(bool(found))
