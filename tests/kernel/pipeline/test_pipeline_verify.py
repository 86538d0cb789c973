from collections.abc import Sequence
from random import Random
from typing import Any, cast

import pytest

from megatron_run.contracts.schedule import Action, LayoutSpec, Place, ScheduleSpec, looped_layout
from megatron_run.errors import InputError, ScheduleError
from megatron_run.pipeline.plan import positions
from megatron_run.pipeline.verify import check_layout, verify
from tests.support.random_schedules import looped_spec, random_lists, random_plan, random_spec, vee_layout

GOOD = ("F0.0 F1.0 B0.0 B1.0", "F0.0 B0.0 F1.0 B1.0")


def spec(stages: int = 2, chunks: int = 1, microbatches: int = 2) -> ScheduleSpec:
    return looped_spec(stages, chunks, microbatches)


def lists(texts: Sequence[str]) -> list[list[Action]]:
    return [[Action.parse(word) for word in text.split()] for text in texts]


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (("F0.0 F1.0 B0.0 B1.0", "F0.0 B0.0 F1.0"), ("stage 1", "B1.0 is missing", "no backward")),
        (("F0.0 B0.0", "F0.0 B0.0"), ("stage 0", "F1.0 is missing", "every microbatch")),
        (("F0.0 F1.0 B0.0 B1.0", "F0.0 I0.0 F1.0 B1.0"), ("stage 1", "W0.0 is missing", "no weight gradient")),
        (("F0.0 F1.0 B0.0 B1.0 B0.0", GOOD[1]), ("stage 0, action 4: B0.0 is repeated", "action 2")),
        ((GOOD[0], "F0.0 F0.0 B0.0 F1.0 B1.0"), ("stage 1, action 1: F0.0 is repeated", "action 0")),
        ((GOOD[0], "B0.0 F0.0 F1.0 B1.0"), ("stage 1, action 0: B0.0 is too early", "F0.0", "later, at action 1")),
        ((GOOD[0], "B0.0 F1.0 B1.0"), ("stage 1, action 0: B0.0 is too early", "F0.0", "nowhere in the list")),
        ((GOOD[0], "F0.0 W0.0 I0.0 F1.0 B1.0"), ("stage 1, action 1: W0.0 is too early", "I0.0", "at action 2")),
        ((GOOD[0], "F0.0 I0.0 B0.0 F1.0 B1.0"), ("stage 1, action 2: B0.0 is too late", "I0.0 stands at action 1")),
        ((GOOD[0], "F0.0 B0.0 W0.0 F1.0 B1.0"), ("stage 1, action 2: W0.0 is too late", "B0.0 stands at action 1")),
        ((GOOD[0], "F0.0 B0.0 R0.0 F1.0 B1.0"), ("stage 1, action 2: R0.0 is too late", "B0.0 stands at action 1")),
        ((GOOD[0], "F0.0 R0.0 R0.0 B0.0 F1.0 B1.0"), ("stage 1, action 2: R0.0 is repeated", "action 1")),
        ((GOOD[0], "F0.0 B0.0 S0.0 F1.0 B1.0"), ("stage 1, action 2: S0.0 is too early", "gradients to come")),
        ((GOOD[0], "F0.0 B0.0 F1.0 B1.0 S0.0 S0.0"), ("stage 1, action 5: S0.0 is repeated", "action 4")),
        ((GOOD[0], "F0.0 B0.0 F1.0 B1.0 S1.0"), ("stage 1, action 4: S1.0 has a microbatch", "write S0.0")),
        ((GOOD[0], "F0.0 B0.0 F1.0 B1.0 F2.0"), ("stage 1, action 4: F2.0 is out of range", "2 microbatches")),
        ((GOOD[0], "F0.1 B0.0 F1.0 B1.0"), ("stage 1, action 0: F0.1 is out of range", "1 chunk")),
    ],
)
def test_a_fault_is_named_with_rank_index_and_action(texts: tuple[str, str], words: tuple[str, ...]) -> None:
    with pytest.raises(ScheduleError) as fault:
        verify(spec(), lists(texts))
    for word in words:
        assert word in str(fault.value)
    assert "\n" not in str(fault.value)


def test_something_that_is_no_action_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"stage 0, action 0: 'F0.0' is not an Action"):
        verify(spec(1, 1, 1), [["F0.0", "B0.0"]])  # type: ignore[list-item]  # the mistake under test
    with pytest.raises(ScheduleError, match=r"stage 0, action 1: X0.0 is unknown"):
        verify(spec(1, 1, 1), [[Action("F", 0, 0), Action("X", 0, 0)]])  # type: ignore[arg-type]  # the same
    with pytest.raises(ScheduleError, match=r"2 action lists: the pipeline has 1 stage"):
        verify(spec(1, 1, 1), lists(("F0.0 B0.0", "F0.0 B0.0")))


def test_a_deadlock_names_the_whole_cycle() -> None:
    with pytest.raises(ScheduleError) as fault:
        verify(spec(), lists(("F0.0 B0.0 F1.0 B1.0", "F0.0 F1.0 B0.0 B1.0")))
    assert str(fault.value) == (
        "the schedule deadlocks: "
        "stage 0, action 1: B0.0 waits for B0.0 of stage 1 (action 2, behind F1.0); "
        "stage 1, action 1: F1.0 waits for F1.0 of stage 0 (action 2, behind B0.0)"
    )


def test_a_deadlock_within_one_stage_names_itself() -> None:
    with pytest.raises(
        ScheduleError, match=r"stage 0, action 0: F0.1 waits for F0.0 of stage 0 \(action 1, behind F0.1\)"
    ):
        verify(spec(1, 2, 1), lists(("F0.1 F0.0 B0.1 B0.0",)))


def test_the_cycle_leaves_out_stages_that_only_wait_for_it() -> None:
    stuck = ("F0.0 F1.0 B0.0 B1.0", "F0.0 B0.0 F1.0 B1.0", "F0.0 F1.0 B0.0 B1.0")
    with pytest.raises(ScheduleError) as fault:
        verify(spec(stages=3), lists(stuck))
    assert "stage 1, action 1" in str(fault.value)
    assert "stage 2, action 1" in str(fault.value)
    assert "stage 0, action" not in str(fault.value)


def test_recompute_and_sync_are_optional_parts_of_a_legal_list() -> None:
    plan = verify(spec(), lists(("F0.0 F1.0 R0.0 B0.0 B1.0 S0.0", "F0.0 R0.0 I0.0 F1.0 W0.0 B1.0")))
    assert plan.peak_in_flight == (2, 1)
    assert plan.peak_pending_weights == (0, 1)
    assert plan.peak_held == (2, 2)  # F1.0 precedes W0.0 on the second stage


@pytest.mark.parametrize("seed", range(60))
def test_the_order_is_a_linear_extension_of_the_action_graph(seed: int) -> None:
    plan = random_plan(seed)
    position_of, done = positions(plan.layout), set()
    heads = [0] * plan.stages
    for stage, index in plan.order:
        op, microbatch, chunk = plan.lists[stage][index]
        position = position_of[stage, chunk]
        assert index == heads[stage]
        heads[stage] += 1
        if op == "F" and position:
            assert ("F", microbatch, position - 1) in done
        if op in "BI" and position + 1 < len(plan.layout):
            assert ("B", microbatch, position + 1) in done
        done.add(("B" if op in "BI" else op, microbatch, position))
    assert heads == [len(actions) for actions in plan.lists]


def test_the_order_is_by_completion_time_and_ties_go_by_stage() -> None:
    # F0.0 ends at 1 on stage 0; at 2, F1.0 of stage 0 and F0.0 of stage 1 end together: the lower stage comes first.
    assert verify(spec(), lists(GOOD)).order == ((0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (0, 2), (1, 3), (0, 3))


def test_costs_of_zero_still_give_a_linear_extension() -> None:
    free = ScheduleSpec(vee_layout(LayoutSpec(2, 2, 4)), 2, 2, 1, costs={"F": 0, "B": 0})
    plan = verify(free, lists(("F0.0 F0.1 B0.1 B0.0", "F0.0 F0.1 B0.1 B0.0")))
    assert plan.order == ((0, 0), (1, 0), (1, 1), (0, 1), (0, 2), (1, 2), (1, 3), (0, 3))


@pytest.mark.parametrize("seed", range(40))
def test_dropping_repeating_or_moving_an_action_is_found(seed: int) -> None:
    random = Random(seed)
    asked = random_spec(random)
    legal = random_lists(asked, random)
    stage = random.randrange(asked.stages)
    index = random.randrange(len(legal[stage]))
    action = legal[stage][index]

    dropped = [list(actions) for actions in legal]
    del dropped[stage][index]
    repeated = [list(actions) for actions in legal]
    repeated[stage].append(action)
    for broken in (dropped, repeated):
        with pytest.raises(ScheduleError, match=rf"stage {stage}.*\d+\.{action.chunk}"):
            verify(asked, broken)


def test_a_recomputed_forward_holds_nothing_before_it_is_recomputed() -> None:
    plan = verify(spec(1, 1, 3), lists(("F0.0 F1.0 F2.0 R0.0 B0.0 R1.0 I1.0 W1.0 R2.0 B2.0",)))
    assert plan.peak_in_flight == (1,)
    mixed = verify(spec(1, 1, 3), lists(("F0.0 F1.0 F2.0 R1.0 B1.0 B0.0 B2.0",)))
    assert mixed.peak_in_flight == (3,)


def test_peaks_are_counted_by_hand() -> None:
    plan = verify(spec(1, 1, 3), lists(("F0.0 F1.0 I0.0 F2.0 I1.0 W0.0 B2.0 W1.0",)))
    assert plan.peak_in_flight == (2,)
    assert plan.peak_pending_weights == (2,)
    assert plan.peak_held == (3,)  # after F2.0: 0 and 1 wait or are in flight, and 2 is


@pytest.mark.parametrize(
    ("text", "ascending"),
    [
        ("F0.0 F1.0 B0.0 B1.0", True),
        ("F0.0 F1.0 B1.0 B0.0", False),
        ("F0.0 F1.0 I0.0 I1.0 W0.0 W1.0", True),
        ("F0.0 F1.0 I1.0 I0.0 W0.0 W1.0", False),
        ("F0.0 F1.0 I0.0 I1.0 W1.0 W0.0", False),
        ("F0.0 F1.0 I0.0 B1.0 W0.0", False),
    ],
)
def test_ascending_means_that_gradients_accumulate_in_microbatch_order(text: str, ascending: bool) -> None:
    assert verify(spec(1, 1, 2), lists((text,))).ascending is ascending


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ((Place(0, 0, range(2)), Place(1, 0, range(2, 3))), "the layout ends after 3 layers: layers 0 to 3 must"),
        (
            (Place(0, 0, range(2)), Place(1, 0, range(1, 4))),
            "place 1 .* holds the layers .1, 2, 3.: layer 2 comes next",
        ),
        ((Place(1, 0, range(2, 4)), Place(0, 0, range(2))), "place 0 .* holds the layers .2, 3.: layer 0 comes next"),
        (
            (Place(0, 0, range(2)), Place(0, 0, range(2, 4))),
            "place 1 .*stage 0, chunk 0. is repeated: .* exactly one place",
        ),
        (
            (Place(0, 0, range(2)), Place(2, 0, range(2, 4))),
            "place 1 .*stage 2, chunk 0. is out of range: .* one place",
        ),
        ((Place(0, 0, range(4)),), "no place for stage 1, chunk 0: .* exactly one place"),
    ],
)
def test_a_layout_that_loses_repeats_or_misplaces_layers_is_refused(layout: tuple[Place, ...], words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        check_layout(LayoutSpec(2, 1, 4), layout)


@pytest.mark.parametrize("place", [Place(0, 0, cast("Any", 1)), (0, 0, range(4)), Place(0, 0, cast("Any", [0, 1]))])
def test_a_place_of_other_things_than_stage_chunk_and_range_says_how_one_is_written(place: Any) -> None:
    with pytest.raises(ScheduleError) as error:
        check_layout(LayoutSpec(1, 1, 4), [place])
    assert str(error.value) == f"place 0 of the layout is {place!r}; write Place(stage, chunk, range(first, stop))"


@pytest.mark.parametrize("counts", [(4,), (2, 2, 0), (2, 3), (5, -1)])
def test_counts_that_are_none_for_the_places_are_no_fault_of_the_layout(counts: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"parallel\.layers (has|adds up to)"):
        check_layout(LayoutSpec(2, 1, 4, counts), looped_layout(LayoutSpec(2, 1, 4)))


def test_a_layout_may_have_empty_places() -> None:
    check_layout(LayoutSpec(2, 1, 4), (Place(0, 0, range(4)), Place(1, 0, range(4, 4))))
