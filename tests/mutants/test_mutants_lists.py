"""Every mutant can still be planted, modules of the tool are there, and a page that is written is read again."""

from __future__ import annotations

import tomllib
from pathlib import Path

from tests.mutants.catalogue import LISTS, Mutant, faults, read_mutants, source_of
from tests.mutants.results import Results
from tests.mutants.trial import Result
from tests.support.checkout import ROOT


def test_every_mutant_can_be_planted() -> None:
    mutants = list(read_mutants())
    assert list(faults(mutants, ROOT)) == []
    assert 50 <= len(mutants) <= 100, "what changes an operator or a number is left to the tool"


def test_the_modules_that_a_tool_changes_are_there_with_their_tests() -> None:
    listed = tomllib.loads((LISTS / "modules.toml").read_text(encoding="utf-8"))["module"]
    assert len(listed) >= 20
    for module in listed:
        assert source_of(module["name"], ROOT).is_file()
        assert all((ROOT / test).exists() for test in module["tests"])


def test_a_list_that_no_longer_fits_is_told(tmp_path: Path) -> None:
    source = tmp_path / "core" / "src" / "tiny.py"
    source.parent.mkdir(parents=True)
    source.write_text("one = 1\nother = 1\n")
    (tmp_path / "test_tiny.py").touch()

    def mutant(name: str, find: str, put: str, test: str = "test_tiny.py", module: str = "tiny") -> Mutant:
        return Mutant(name, "it", module, find, put, (test,))

    told = list(
        faults(
            [
                mutant("sound", "one = 1", "one = 2"),
                mutant("twice", "= 1", "= 2"),
                mutant("gone", "two = 2", "two = 3"),
                mutant("broken", "one = 1", "one ="),
                mutant("same", "one = 1", "one = 1"),
                mutant("untested", "one = 1", "one = 3", test="test_gone.py -k it"),
                mutant("moved", "one = 1", "one = 3", module="gone"),
                mutant("sound", "one = 1", "one = 4"),
            ],
            tmp_path,
        )
    )
    assert told[0] == "sound: given twice"
    assert [line.partition(":")[0] for line in told[1:]] == ["twice", "gone", "broken", "same", "untested", "moved"]


def test_a_page_of_results_is_read_again_and_says_when_something_is_wrong(tmp_path: Path) -> None:
    page, results = tmp_path / "RESULTS.md", Results()
    mutants = [Mutant(name, "a | b", "m", "x", "y", ("t",), why) for name, why in (("a", ""), ("b", "because"))]
    results.add(mutants[0], Result("killed", "t::test_it", 3.2))
    results.add(mutants[1], Result("survived", "", 12.0))
    results.write(page, mutants)
    again = Results.read(page)
    assert again.of == {"a": Result("killed", "t::test_it", 3.0), "b": Result("survived", "", 12.0)}
    assert "- `b`: because" in page.read_text()
    assert again.verdict([mutants[0]] * 9 + mutants) == 0
    assert again.verdict(mutants) == 1, "half of them is too few"
    again.add(mutants[0], Result("survived", "", 1.0))
    assert again.verdict([mutants[0]]) == 1, "nobody has explained it"
    again.add(mutants[1], Result("killed", "t::test_it", 1.0))
    assert again.verdict([mutants[1]]) == 1, "the explanation is wrong"
