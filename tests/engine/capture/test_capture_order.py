"""The order of passes and the slots that follow from it, against closed formulas; and the guard of the order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest

from megatron_run.contracts import Schedule
from megatron_run.contracts.schedule import Action
from megatron_run.errors import GraphCaptureError
from megatron_run_engine.capture import OrderGuard, passes, recordings, shared_slots, slots_by_chunk
from megatron_run_schedule_1f1b import OneForwardOneBackward
from megatron_run_schedule_interleaved import Interleaved
from megatron_run_schedule_zero_bubble.h1 import ZeroBubbleH1
from tests.support.random_schedules import looped_spec

#: (P, rank, V, M, G): stages, stage, chunks, microbatches and the group of the interleaved schedule.
Config = tuple[int, int, int, int, int]
CONFIGS: list[Config] = [
    *((p, rank, 1, m, p) for p in range(1, 9) for rank in range(p) for m in (1, 2, 4, 7, 8, 16)),
    *(
        (p, rank, v, groups * g, g)
        for p, v, groups in product((2, 3, 4, 8), (2, 3, 4), (1, 2, 4))
        for g in (p, p + 1)
        for rank in range(p)
    ),
]


def warmup(p: int, rank: int, v: int, m: int, g: int) -> int:
    """Forwards before the first backward (Narayanan et al. 2021, section 2.2)."""
    return min(p - rank - 1 if v == 1 else 2 * (p - rank - 1) + (v - 1) * g, m * v)


def closed_order(config: Config) -> list[tuple[str, int, int]]:
    """The k-th backward follows the (k + warm-up + 1)-th forward, or the last one: (kind, chunk, microbatch)."""
    _, _, v, m, g = config
    pairs = [(c, start + i) for start in range(0, m, g) for c in range(v) for i in range(min(g, m - start))]
    order, forwards = [], 0
    for k, (chunk, microbatch) in enumerate(pairs):
        while forwards < min(k + warmup(*config) + 1, len(pairs)):
            order.append(("F", *pairs[forwards]))
            forwards += 1
        order.append(("B", v - 1 - chunk, microbatch))
    return order


def actions_of(config: Config) -> Sequence[Action]:
    p, rank, v, m, g = config
    schedule: Schedule = OneForwardOneBackward() if v == 1 else Interleaved(g)
    return schedule.actions(looped_spec(p, v, m))[rank]


def test_there_are_at_least_four_hundred_configurations() -> None:
    assert len(CONFIGS) >= 400


def test_the_order_is_that_of_the_closed_formulas() -> None:
    for config in CONFIGS:
        found = [each for each in passes(actions_of(config), config[2]) if each.kind != "end"]
        assert found == closed_order(config), config


def test_slots_are_the_peak_in_flight() -> None:
    """min(warm-up + 1, M * V), and no two pairs in flight share one."""
    for config in CONFIGS:
        order = passes(actions_of(config), config[2])
        slots, taken = shared_slots(order), set()
        assert slots.count == min(warmup(*config) + 1, config[2] * config[3]), config
        for kind, chunk, copy in order:
            slot = slots.of[chunk, copy]
            if kind == "F":
                assert slot not in taken
                taken.add(slot)
            elif kind == "end":
                taken.remove(slot)


def test_slots_of_a_chunk_are_the_most_that_it_has_in_flight() -> None:
    order = passes(actions_of((4, 0, 2, 8, 4)), 2)
    flight, peaks = [0, 0], [0, 0]
    for kind, chunk, _ in order:
        flight[chunk] += (kind == "F") - (kind == "end")
        peaks[chunk] = max(peaks[chunk], flight[chunk])
    assert [slots.count for slots in slots_by_chunk(order, 2)] == peaks
    assert sum(peaks) > shared_slots(order).count  # two peaks at different times


def test_a_split_backward_is_captured_whole_and_ends_at_its_weight_gradient() -> None:
    spec = looped_spec(2, 1, 2)
    order = passes(ZeroBubbleH1().actions(spec)[1], 1)
    assert [each.kind for each in order if each.copy == 0] == ["F", "B", "end"]
    actions = [Action.parse(text) for text in ["F0.0", "I0.0", "F1.0", "W0.0", "I1.0", "W1.0"]]
    assert [(each.kind, each.copy) for each in passes(actions, 1)] == [
        ("F", 0), ("B", 0), ("F", 1), ("end", 0), ("B", 1), ("end", 1),
    ]  # fmt: skip
    assert shared_slots(passes(actions, 1)).count == 2


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ("B0.0 F0.0", r"action 0, B0\.0, cannot be captured: this backward comes before its forward"),
        ("F0.0 F1.0 B0.0", r"action 1, F1\.0, cannot be captured: its backward is missing"),
        ("F0.0 B0.0 F0.1 B0.1", r"action 2, F0\.1, cannot be captured: there are 1 chunks"),
        ("F0.0 F0.0", r"action 1, F0\.0, .* this forward was there before"),
        ("F0.0 B0.0 B0.0", r"action 2, B0\.0, .* this backward was there before"),
        ("F0.0 W0.0", r"action 1, W0\.0, .* comes before its I"),
        ("F0.0 R0.0 B0.0", r"action 1, R0\.0, .* recomputed"),
    ],
)
def test_a_list_that_is_no_order_is_refused_with_the_index(texts: str, message: str) -> None:
    with pytest.raises(GraphCaptureError, match=message):
        passes([Action.parse(text) for text in texts.split()], 1)


def test_the_guard_knows_one_order_step_after_step() -> None:
    guard = OrderGuard("abc")
    for step in (1, 2):
        for event in "abc":
            guard.check(event, step)
    guard.check("a", 3)
    with pytest.raises(GraphCaptureError, match="c was about to be replayed out of order: recorded next was b"):
        guard.check("c", 3)
    guard.check("b", 3)
    with pytest.raises(GraphCaptureError, match="step 4 begins before step 3 was replayed to its end"):
        guard.check("a", 4)


def test_the_guard_does_not_wait_for_what_runs_eagerly_in_one_step() -> None:
    guard = OrderGuard("abcd")
    guard.leave_out("bd", 1)
    for event in "ac":
        guard.check(event, 1)
    guard.check("a", 2)
    with pytest.raises(GraphCaptureError, match="recorded next was b"):
        guard.check("c", 2)


@pytest.mark.parametrize("before", ["", "ab", "abcd"])
def test_a_step_that_is_run_again_may_leave_out_other_events_than_it_did_before(before: str) -> None:
    """A run that goes back repeats the step's number."""
    guard = OrderGuard("abcd")
    for left_out in (before, "ab", "d", ""):
        guard.leave_out(left_out, 5)
        for event in "abcd":
            if event not in left_out:
                guard.check(event, 5)
    guard.check("a", 6)


def test_what_a_step_leaves_out_it_may_say_one_by_one() -> None:
    guard = OrderGuard("abcdef")
    guard.leave_out("af", 1)
    guard.leave_out("be", 1)
    guard.leave_out("c", 1)
    guard.check("d", 1)
    guard.check("a", 2)
    with pytest.raises(GraphCaptureError, match="next was b"):
        guard.check("c", 2)


def parsed(text: str) -> list[Action]:
    return [Action.parse(each) for each in text.split()]


@pytest.mark.parametrize(
    ("text", "chunks", "recorded", "copies"),
    [
        ("F0.0 B0.0 F1.0 B1.0 F2.0 B2.0", 1, 1, [0, 0, 0]),
        ("F0.0 F1.0 B0.0 B1.0 F2.0 F3.0 B2.0 B3.0", 1, 2, [0, 1, 0, 1]),
        ("F0.0 F1.0 B0.0 F2.0 B1.0 B2.0", 1, 3, [0, 1, 2]),  # always something in flight
        ("F0.0 I0.0 W0.0 F1.0 I1.0 W1.0", 1, 1, [0, 0]),
        ("F0.0 I0.0 F1.0 W0.0 I1.0 W1.0", 1, 2, [0, 1]),  # what W reads is in flight
        ("F0.0 B0.0 F1.0 F2.0 B1.0 B2.0 F3.0 B3.0", 1, 3, [0, 1, 2, 0]),
        ("F0.0 F0.1 B0.1 B0.0 F1.0 F1.1 B1.1 B1.0", 2, 1, [0, 0]),
        ("F0.0 B0.0 F1.0 B1.0 F0.1 B0.1 F1.1 B1.1", 2, 2, [0, 1]),  # chunks that have not run equally often
    ],
)
def test_rounds_that_are_alike_are_recorded_once(text: str, chunks: int, recorded: int, copies: list[int]) -> None:
    found = recordings(passes(parsed(text), chunks), chunks)
    assert {copy for _, _, copy in found.passes} == set(copies)
    assert len([each for each in found.passes if each.kind == "F"]) == recorded * chunks
    for chunk in range(chunks):
        assert [found.copies[chunk, microbatch] for microbatch in range(len(copies))] == copies
