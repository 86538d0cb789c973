"""Lowered programs of arbitrary legal schedules, carried out on paper by a transport with NCCL's rules."""

from collections import Counter
from functools import cache

import pytest

from megatron_run.contracts.schedule import Action, LayoutSpec, ScheduleSpec, looped_layout
from megatron_run.pipeline.lower import Instruction, Message, lower
from megatron_run.pipeline.plan import Plan
from megatron_run.pipeline.verify import forward_plan, verify
from megatron_run_testing.schedule.ordered_channels import (
    Streams,
    SwappedMessageError,
    TransportDeadlockError,
    carry_out,
    per_channel,
    per_stage,
)
from tests.support.random_schedules import Layout, looped_spec, random_plan, vee_layout

SEEDS = range(400)


@cache
def plan_of(seed: int) -> Plan:
    return random_plan(seed)


def programs(plan: Plan, lookahead: int | None = 1) -> list[tuple[Instruction, ...]]:
    return [lower(plan, stage, lookahead) for stage in range(plan.stages)]


def posted_in_order_of_use(program: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
    """The same program with each receive posted by the instruction that needs it."""
    return tuple(
        step._replace(post=(step.receive,) if step.receive and not step.receive.local else ()) for step in program
    )


def outcome(plan: Plan, lowered: list[tuple[Instruction, ...]], streams: Streams = per_channel) -> str:
    try:
        carry_out(lowered, streams)
    except SwappedMessageError:
        return "swapped"
    except TransportDeadlockError:
        return "deadlock"
    return "ok"


def test_400_random_schedules_run_on_ordered_channels() -> None:
    for seed in SEEDS:
        lookahead = (0, 1, 2, 4)[seed % 4]
        assert outcome(plan_of(seed), programs(plan_of(seed), lookahead)) == "ok", f"seed {seed}"


def test_400_random_schedules_run_on_one_stream_a_stage_in_the_global_order() -> None:
    for seed in SEEDS:
        assert outcome(plan_of(seed), programs(plan_of(seed), None), per_stage) == "ok", f"seed {seed}"


def test_posting_in_order_of_use_swaps_messages() -> None:
    found = Counter(
        outcome(plan_of(seed), [posted_in_order_of_use(program) for program in programs(plan_of(seed))])
        for seed in SEEDS
    )
    assert found["swapped"] > 100, found


def test_posting_ahead_deadlocks_where_one_stream_carries_everything() -> None:
    found = Counter(outcome(plan_of(seed), programs(plan_of(seed), 1), per_stage) for seed in SEEDS)
    assert found["deadlock"] > 100, found


@pytest.mark.parametrize("layout", [looped_layout, vee_layout])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 5])
def test_forward_only_plans_run_too(layout: Layout, microbatches: int) -> None:
    places = layout(LayoutSpec(3, 2, 6))
    plan = forward_plan(places, 3, 2, microbatches)
    assert outcome(plan, programs(plan)) == "ok"
    assert outcome(plan, programs(plan, None), per_stage) == "ok"
    assert not any(step.sync for program in programs(plan) for step in program)


@pytest.mark.parametrize("seed", range(40))
def test_every_message_is_sent_and_received_once(seed: int) -> None:
    lowered = programs(plan_of(seed))
    steps = [step for program in lowered for step in program]
    sent = Counter(step.send for step in steps if step.send)
    received = Counter(step.receive for step in steps if step.receive)
    posted = Counter(message for step in steps for message in step.post)
    boundaries = len(plan_of(seed).layout) - 1
    assert sent == received
    assert set(sent.values()) <= {1}
    assert len(sent) == 2 * boundaries * plan_of(seed).microbatches
    assert posted == Counter(message for message in sent if not message.local)


def test_a_hand_off_inside_a_stage_is_local() -> None:
    spec = ScheduleSpec(vee_layout(LayoutSpec(2, 2, 4)), 2, 2, 1)
    plan = verify(spec, [[Action.parse(word) for word in ["F0.0", "F0.1", "B0.1", "B0.0"]]] * 2)
    forward, forward_again, backward, backward_again = lower(plan, 1)
    down, up = Message("x", 0, 1, 1, 2), Message("g", 0, 1, 1, 1)
    assert (forward.send, forward_again.receive) == (down, down)
    assert (backward.send, backward_again.receive) == (up, up)
    assert down.local
    assert not any(message.local for step in lower(plan, 1) for message in (*step.post, *step.retire))


def one_forward_one_backward() -> Plan:
    spec = looped_spec(2, 1, 3)
    texts = ("F0.0 F1.0 B0.0 F2.0 B1.0 B2.0", "F0.0 B0.0 F1.0 B1.0 F2.0 B2.0")
    return verify(spec, [[Action.parse(word) for word in text.split()] for text in texts])


def test_receives_are_posted_at_most_lookahead_actions_early() -> None:
    first = [[(m.kind, m.microbatch) for m in step.post] for step in lower(one_forward_one_backward(), 0, lookahead=1)]
    assert first == [[], [("g", 0)], [], [("g", 1)], [("g", 2)], []]
    at_use = [[(m.kind, m.microbatch) for m in step.post] for step in lower(one_forward_one_backward(), 0, lookahead=0)]
    assert at_use == [[], [], [("g", 0)], [], [("g", 1)], [("g", 2)]]


def test_a_send_is_retired_at_the_first_receive_that_proves_its_use() -> None:
    retired = [[(m.kind, m.microbatch) for m in step.retire] for step in lower(one_forward_one_backward(), 0)]
    assert retired == [[], [], [("x", 0)], [], [("x", 1)], [("x", 2)]]
    last = [[(m.kind, m.microbatch) for m in step.retire] for step in lower(one_forward_one_backward(), 1)]
    # Stage 0 makes F1.0 before it uses g0 and F2.0 after: only the last forward proves anything.
    assert last == [[], [], [], [], [("g", 0)], []]


def test_a_reply_that_is_made_of_the_message_itself_proves_its_use() -> None:
    spec = looped_spec(2, 2, 1)
    plan = verify(spec, [[Action.parse(word) for word in ["F0.0", "F0.1", "B0.1", "B0.0"]]] * 2)
    out, back, *_ = lower(plan, 0)
    assert back.retire == (out.send,)


@pytest.mark.parametrize("seed", range(60))
def test_sends_are_retired_where_brute_force_says(seed: int) -> None:
    plan = plan_of(seed)
    turn = {(stage, plan.lists[stage][index]): number for number, (stage, index) in enumerate(plan.order)}
    lowered = programs(plan)
    steps = [(stage, step) for stage, program in enumerate(lowered) for step in program]
    used = {step.receive: turn[stage, step.action] for stage, step in steps if step.receive}
    made = {step.send: turn[stage, step.action] for stage, step in steps if step.send}
    for program in lowered:
        for index, step in enumerate(program):
            message = step.send
            if message is None or message.local:
                continue
            proofs = [
                later.action
                for later in program[index + 1 :]
                if later.receive and later.receive.source == message.target and used[message] <= made[later.receive]
            ]
            assert [later.action for later in program if message in later.retire] == proofs[:1]


def test_gradients_are_synchronised_at_each_chunks_last_gradient() -> None:
    spec = looped_spec(1, 2, 1)
    split = verify(spec, [[Action.parse(word) for word in ["F0.0", "F0.1", "I0.1", "B0.0", "W0.1"]]])
    assert [str(step.action) for step in lower(split, 0) if step.sync] == ["B0.0", "W0.1"]
    later = verify(spec, [[Action.parse(word) for word in ["F0.0", "F0.1", "B0.1", "B0.0", "S0.1"]]])
    assert [str(step.action) for step in lower(later, 0) if step.sync] == ["B0.0", "S0.1"]
