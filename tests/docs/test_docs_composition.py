"""The results show the bugs of other trainers that are planted, and what became of them."""

from __future__ import annotations

from tests.docs.field_table import PAGE, refreshed
from tests.mutants.catalogue import read_mutants
from tests.mutants.results import RESULTS, Results


def test_the_table_is_what_the_list_and_its_results_say() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert refreshed(page) == page, "run make docs"


def test_every_planted_bug_of_another_trainer_is_killed() -> None:
    found = Results.read(RESULTS).of
    planted = [mutant.id for mutant in read_mutants() if mutant.bug]
    assert len(planted) >= 15
    assert {name: found[name].outcome for name in planted if found[name].outcome != "killed"} == {}
