import time
from collections.abc import Sequence
from itertools import accumulate, product

import pytest

from megatron_run.contracts.schedule import Action, LayoutSpec, ScheduleSpec
from megatron_run.pipeline.plan import Plan
from megatron_run.pipeline.simulate import timeline
from megatron_run.pipeline.verify import verify
from megatron_run_schedule_zero_bubble import ZeroBubbleV
from megatron_run_testing import Check
from megatron_run_testing.schedule import schedule_checks

SHAPES = list(product((1, 2, 3, 4, 6, 8), (1, 2, 3, 4, 7, 8, 16)))


def spec(stages: int, microbatches: int) -> ScheduleSpec:
    return ScheduleSpec(ZeroBubbleV().layout(LayoutSpec(stages, 2, 2 * stages)), stages, 2, microbatches)


def planned(stages: int, microbatches: int) -> Plan:
    asked = spec(stages, microbatches)
    return verify(asked, ZeroBubbleV().actions(asked))


def held(actions: Sequence[Action]) -> int:
    """The most chunk-microbatches between forward and weight gradient."""
    return max(accumulate({"F": 1, "I": 0, "W": -1}[action.op] for action in actions))


def test_the_layout_goes_down_the_stages_and_back_up() -> None:
    layout = ZeroBubbleV().layout(LayoutSpec(3, 2, 12))
    assert [(place.stage, place.chunk) for place in layout] == [(0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1)]
    assert [list(place.layers) for place in layout] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]


def test_the_users_counts_are_in_model_order() -> None:
    layout = ZeroBubbleV().layout(LayoutSpec(2, 2, 8, counts=(1, 3, 4, 0)))
    assert [(place.stage, list(place.layers)) for place in layout] == [
        (0, [0]),
        (1, [1, 2, 3]),
        (1, [4, 5, 6, 7]),
        (0, []),
    ]


def test_one_stage_by_hand() -> None:
    (only,) = planned(1, 2).lists
    assert " ".join(map(str, only)) == "F0.0 F0.1 I0.1 W0.1 F1.0 I0.0 W0.0 F1.1 I1.1 W1.1 I1.0 W1.0"


def test_two_stages_by_hand() -> None:
    first, last = planned(2, 2).lists
    assert " ".join(map(str, first)) == "F0.0 F1.0 F0.1 I0.1 W0.1 F1.1 I1.1 W1.1 I0.0 W0.0 I1.0 W1.0"
    assert " ".join(map(str, last)) == "F0.0 F0.1 F1.0 F1.1 I0.1 W0.1 I0.0 I1.1 I1.0 W0.0 W1.0 W1.1"


def test_every_chunk_takes_its_microbatches_in_order() -> None:
    for stages, microbatches in SHAPES:
        plan = planned(stages, microbatches)
        assert plan.ascending
        for actions in plan.lists:
            forwards = [action for action in actions if action.op == "F"]
            for chunk in (0, 1):
                assert [a.microbatch for a in forwards if a.chunk == chunk] == list(range(microbatches))


def test_no_stage_holds_more_than_twice_the_stages() -> None:
    for stages, microbatches in SHAPES:
        plan = planned(stages, microbatches)
        most = min(2 * stages, 2 * microbatches)
        assert all(held(actions) <= most for actions in plan.lists)
        assert max(held(actions) for actions in plan.lists) == most
    assert planned(4, 8).peak_in_flight == (8, 8, 8, 8)
    assert planned(4, 4).peak_in_flight == (5, 6, 7, 8)


def test_up_to_four_stages_wait_only_for_the_first_forward() -> None:
    # The last stage cannot begin before the forward has come down: P-1 units, and nobody can be faster.
    for stages, microbatches in product((1, 2, 3, 4), range(4, 25)):
        assert timeline(planned(stages, microbatches)).makespan == 6 * microbatches + stages - 1


def test_more_stages_come_within_a_third_of_their_number_of_the_fastest() -> None:
    for stages in (5, 6, 7, 8, 12):
        for microbatches in (stages, stages + 1, 2 * stages, 3 * stages + 1):
            over = timeline(planned(stages, microbatches)).makespan - (6 * microbatches + stages - 1)
            assert 0 <= over <= stages / 3


def test_operations_of_unequal_cost_cost_little() -> None:
    """Input gradients take longer than weight gradients in attention: W right after I bears it, W put off does not."""
    costs = {"F": 1.0, "I": 1.3, "W": 0.8}
    for stages, microbatches, over in ((2, 8, 0.03), (3, 6, 0.08), (4, 8, 0.1), (4, 16, 0.05)):
        step = timeline(planned(stages, microbatches), costs).makespan
        assert step <= (1 + over) * 2 * microbatches * sum(costs.values())


def test_chunks_of_unequal_size_cost_little() -> None:
    """The head weighs two layers, and the first stage has it: so its chunks hold one layer each, the other's two."""
    layout = ZeroBubbleV().layout(LayoutSpec(2, 2, 6, counts=(1, 2, 2, 1)))
    asked = ScheduleSpec(layout, 2, 2, 8)
    lists = ZeroBubbleV().actions(asked)
    weights = {0: (1, 3), 1: (2, 2)}  # of chunk 0 and 1, by stage
    done: dict[tuple[str, int, int], float] = {}  # by operation, microbatch, position
    now, following = [0.0, 0.0], [0, 0]
    while any(following[stage] < len(lists[stage]) for stage in (0, 1)):
        for stage in (0, 1):
            while following[stage] < len(lists[stage]):
                op, microbatch, chunk = lists[stage][following[stage]]
                position = 3 - stage if chunk else stage
                awaited = ("F", microbatch, position - 1) if op == "F" else ("I", microbatch, position + 1)
                awaited = ("F", microbatch, 3) if awaited[2] > 3 else awaited
                if op != "W" and awaited[2] >= 0 and awaited not in done:
                    break
                start = now[stage] if op == "W" else max(now[stage], done.get(awaited, 0.0))
                now[stage] = done[op, microbatch, position] = start + weights[stage][chunk]
                following[stage] += 1
    assert max(now) <= 1.06 * 8 * 3 * 4


def test_large_shapes_are_planned_at_once() -> None:
    asked = spec(16, 256)
    started = time.process_time()
    lists = ZeroBubbleV().actions(asked)
    assert time.process_time() - started < 10  # a search would take hours
    assert sum(map(len, lists)) == 3 * 2 * 16 * 256


def over_ideal(asked: ScheduleSpec) -> float | None:
    """Of at most four stages and at least four microbatches."""
    few = asked.stages <= 4 <= asked.microbatches
    return (asked.stages - 1) / (6 * asked.microbatches) if few else None


def test_four_stages_and_eight_microbatches_are_a_sixteenth_over_the_ideal() -> None:
    assert over_ideal(spec(4, 8)) == 0.0625


@pytest.mark.parametrize(
    "check",
    schedule_checks(
        ZeroBubbleV(),
        in_flight=lambda _, asked: 2 * min(asked.stages, asked.microbatches),
        bubble=over_ideal,
        ascending=True,
    ),
    ids=lambda check: check.name,
)
def test_it_conforms(check: Check) -> None:
    check.run()
