"""The list of the field's silent bugs is made from the list of mutants and what became of them, after a marker.

``make docs`` brings it up to date; a test fails where it is not.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.mutants.catalogue import LISTS, read_mutants
from tests.mutants.results import RESULTS, Results
from tests.support.checkout import ROOT

PAGE = ROOT / "benchmarks" / "results" / "field.md"

_LIST = re.compile(r"(?<=<!-- field -->\n).*?(?=<!-- end of field -->)", re.DOTALL)
_CHECK = re.compile(r"test_field and (\w+)\]")


def listed() -> str:
    """How many were found; the thread, what finds it, and what was planted; then what was not planted, and why."""
    found, planted = Results.read(RESULTS).of, [mutant for mutant in read_mutants() if mutant.bug]
    killed = [mutant for mutant in planted if mutant.id in found and found[mutant.id].outcome == "killed"]
    count = f"{len(killed)} of {len(planted)} are found"
    rows = [
        f"{count}. Each has its thread, the composition or the tests that find it, and what is planted:",
        "",
        *(f"- {each.bug.partition(':')[0]} (`{_found_by(each.tests[0])}`): {each.breaks}" for each in planted),
    ]
    return "\n".join([*rows, "", "Not planted:", "", *_absent()]) + "\n"


def _found_by(test: str) -> str:
    """The composition of ``test``, or the name of its file."""
    found = _CHECK.search(test)
    return found[1] if found else Path(test.partition(" ")[0]).stem


def _absent() -> Iterator[str]:
    absent = tomllib.loads((LISTS / "field.toml").read_text(encoding="utf-8"))["absent"]
    yield from (f"- {each['bug']}: {each['why']}." for each in absent)


def refreshed(page: str) -> str:
    """``page`` with the list as mutants and results are now. Raises ValueError for a page without the marker."""
    found, count = _LIST.subn(lambda _: f"\n{listed()}\n", page)
    if count != 1:
        raise ValueError(f"{PAGE.name} has {count} markers of the list, expected 1")
    return found


if __name__ == "__main__":
    PAGE.write_text(refreshed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
