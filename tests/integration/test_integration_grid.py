"""Every schedule in every shape trains what a single process trains, and runs exactly what was planned.

``grid.py`` says which shapes there are; here each schedule runs in every variant's choices, each shape's choice once,
and every other shape is planned only. ``make grid`` runs every shape in every variant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations

import pytest

from megatron_run.planning import resolve
from tests.integration.grid import FEW, PAIRED, RULES, Case, Shape, Variant, selection, shapes, telling, whole_product
from tests.integration.grid_checks import (
    Trained,
    gradient_faults,
    loss_faults,
    message_faults,
    order_faults,
    peak_faults,
    refusal_faults,
)
from tests.support.installed import found_once
from tests.support.plugin_file import schedule_file
from tests.support.training import Seen, train_many

#: Seconds for a batch of runs: far more than an idle machine needs.
PATIENCE = 500.0
CHECKS = (order_faults, gradient_faults, loss_faults, peak_faults, message_faults)
SELECTION = selection()
#: A schedule of someone else's that is not ascending: gradients are added up from the last microbatch to the first.
LAST_FIRST = """
forwards = [Action("F", m, 0) for m in range(spec.microbatches)]
backwards = [Action("B", m, 0) for m in reversed(range(spec.microbatches))]
return [forwards + backwards] * spec.stages
"""
INTERLEAVED, V = Shape("interleaved", 2, 2, 4), Shape("zero-bubble,variant=v", 2, 2, 3)
SPECIAL = {
    name: replace(case, steps=FEW)
    for name, case in {
        "empty stage": Case(Shape("1f1b", 4, 1, 3), Variant(dropout=True), layers=6, counts=(3, 0, 0, 3)),
        "only the embedding, only the loss": Case(
            Shape("gpipe", 2, 3, 2), Variant(tied=False), counts=(0, 3, 0, 1, 2, 0)
        ),
        "empty chunks": Case(Shape("interleaved", 4, 2, 4), layers=6, counts=(1, 0, 2, 0, 0, 2, 0, 1)),
        "an empty fold": Case(Shape("zero-bubble,variant=v", 4, 2, 3), layers=6, counts=(2, 1, 0, 0, 0, 0, 1, 2)),
        "interleaved, data 2": Case(INTERLEAVED, Variant(recompute=True), layers=4, data=2),
        "zero-bubble v, data 2": Case(V, Variant(tied=False, dropout=True), layers=4, data=2),
        "not ascending": Case(Shape("gpipe", 2, 1, 5), Variant(tied=False, dropout=True)),
    }.items()
}
#: By day test_integration_loss_mean and test_integration_experts have pipelines of several data-parallel ranks.
RARE = {name for name, case in SPECIAL.items() if case.data > 1}


pytestmark = pytest.mark.timeout(2 * PATIENCE)


@cache
def single_processes() -> dict[Case, Seen]:
    """Every reference of the selection, and of the special cases, that is one process."""
    cases = [case for case in (*SELECTION, *SPECIAL.values()) if case.data == 1]
    references = sorted({case.reference for case in cases})
    trained = train_many(1, [case.request for case in references], timeout=PATIENCE)
    return {case: seen for case, (seen,) in zip(references, trained, strict=True)}


@cache
def selected(stages: int) -> list[Trained]:
    """The selection's cases of this many stages; a reference is its own."""
    alone = single_processes()
    mine = [case for case in SELECTION if case.world == stages and case not in alone]
    trained = train_many(stages, [case.request for case in mine], timeout=PATIENCE)
    runs = [Trained(case, ranks, alone[case.reference]) for case, ranks in zip(mine, trained, strict=True)]
    return runs + [Trained(case, [seen], seen) for case, seen in alone.items() if stages == 1]


@pytest.fixture(scope="module")
def special(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], dict[str, Trained]]:
    """The special cases, the rare ones or the others.

    With data parallelism they are compared with the same data parallelism without a pipeline.
    """
    file = schedule_file(tmp_path_factory.mktemp("mine") / "last_first.py", actions=LAST_FIRST)
    every = SPECIAL | {"not ascending": replace(SPECIAL["not ascending"], plugin=f"schedule={file}")}

    @cache
    def trained(rare: bool) -> dict[str, Trained]:
        cases = {name: case for name, case in every.items() if (name in RARE) is rare}
        asked = sorted({*cases.values(), *(case.reference for case in cases.values() if case.data > 1)})
        done: dict[Case, list[Seen]] = {}
        for world in sorted({case.world for case in asked}):
            mine = [case for case in asked if case.world == world]
            done |= dict(zip(mine, train_many(world, [case.request for case in mine], timeout=PATIENCE), strict=True))
        alone = {**single_processes(), **{case: ranks[0] for case, ranks in done.items()}}
        return {name: Trained(case, done[case], alone[case.reference]) for name, case in cases.items()}

    return trained


def faults(check: Callable[[Trained], Iterator[str]], trained: Iterable[Trained]) -> list[str]:
    return [fault for each in trained for fault in check(each)]


def test_every_choice_of_a_telling_shape_is_selected_and_each_schedule_with_every_choice_of_a_variant() -> None:
    def shown(cases: Iterable[Case]) -> set[object]:
        return {each for case in cases for each in (*case.axes.items(), *pairs(case))}

    def pairs(case: Case) -> Iterator[object]:
        return combinations([each for each in case.axes.items() if each[0] in PAIRED], 2)

    assert shown(SELECTION) == shown(filter(telling, whole_product()))


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removesuffix("_faults"))
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_schedule_runs_its_plan_and_trains_what_a_single_process_trains(
    stages: int, check: Callable[[Trained], Iterator[str]]
) -> None:
    assert not faults(check, selected(stages))


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removesuffix("_faults"))
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.nightly] * (name in RARE)) for name in SPECIAL])
def test_so_does_a_special_case(
    special: Callable[[bool], dict[str, Trained]], name: str, check: Callable[[Trained], Iterator[str]]
) -> None:
    assert not faults(check, [special(name in RARE)[name]])


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.parametrize("rare", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["most", "rare"])
def test_gradients_are_exact_wherever_the_plan_is_ascending(
    special: Callable[[bool], dict[str, Trained]], rare: bool
) -> None:
    for name, trained in special(rare).items():
        ascending = trained.ranks[0].plan.ascending
        assert ascending is (name != "not ascending")
        if not trained.case.variant.tied:
            assert trained.bit_equal is ascending


@pytest.mark.parametrize("schedule", RULES)
def test_every_accepted_shape_has_a_plan(schedule: str) -> None:
    mine = [shape for shape in shapes() if shape.schedule == schedule and shape.accepted]
    assert mine
    with found_once():
        for shape in mine:
            assert resolve(Case(shape).request).plans, shape


@pytest.mark.parametrize("schedule", RULES)
def test_every_other_shape_is_refused_with_what_to_type(schedule: str) -> None:
    refused = [shape for shape in shapes() if shape.schedule == schedule and not shape.accepted]
    assert refused or schedule == "gpipe"
    with found_once():
        assert not [fault for shape in refused for fault in refusal_faults(shape)]
