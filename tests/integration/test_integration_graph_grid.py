"""A run with captured graphs trains what it trains without, bit for bit, whatever else is chosen.

``graph_grid.py`` says what there is to choose; here a selection runs that meets each choice, and ``make graph-grid``
runs the whole product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache

import pytest

from tests.integration.graph_grid import NETWORKS, PRECISIONS, WAYS, Case, selection
from tests.integration.graph_grid_checks import Compared, capture_faults, number_faults
from tests.integration.grid import RULES
from tests.support.training import Seen, train_many

SELECTION = selection()


@cache
def compared() -> list[Compared]:
    """The selection and the same without graphs, in a pair of processes for each number of ranks."""
    trained: dict[Case, Sequence[Seen]] = {}
    for world in (1, 2):
        mine = [case for case in SELECTION if case.arrangement.world == world]
        every = [each for case in mine for each in (case.eager, case)]
        trained |= zip(every, train_many(world, [case.request for case in every]), strict=True)
    return [Compared(case, trained[case], trained[case.eager]) for case in SELECTION]


def test_the_selection_meets_every_choice() -> None:
    ways = {case.way for case in SELECTION}
    assert {case.arrangement.shape.schedule for case in SELECTION} == set(RULES)
    assert {case.network for case in SELECTION} == set(NETWORKS)
    assert {case.precision for case in SELECTION} == set(PRECISIONS)
    assert ways - {None} == set(WAYS)
    assert any(case.arrangement.start for case in SELECTION)


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.parametrize("check", [number_faults, capture_faults], ids=["numbers", "captures"])
def test_with_graphs_it_trains_the_same_and_captures_what_was_planned(
    check: Callable[[Compared], Iterator[str]],
) -> None:
    assert not [fault for each in compared() for fault in check(each)]
