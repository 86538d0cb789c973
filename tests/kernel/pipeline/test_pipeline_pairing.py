"""Every send meets its receive: what the verifier proves of a plan, and what lowering checks of a program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from megatron_run.contracts.schedule import Action, LayoutSpec, ScheduleSpec
from megatron_run.errors import ScheduleError
from megatron_run.pipeline import lower as lowering
from megatron_run.pipeline.lower import Message, check_pairing, lower
from megatron_run.pipeline.plan import Plan
from megatron_run.pipeline.verify import verify
from tests.support.random_schedules import looped_spec, random_plan, vee_layout

FOLDED = "F0.0 F0.1 B0.1 B0.0 F1.0 F1.1 B1.1 B1.0"


def folded(costs: dict[str, float]) -> Plan:
    """Two stages, down and up again, one microbatch after the other."""
    spec = ScheduleSpec(vee_layout(LayoutSpec(2, 2, 4)), 2, 2, 2, costs)
    return verify(spec, [[Action.parse(word) for word in FOLDED.split()]] * 2)


def crossing() -> Plan:
    """Stage 0 sends the microbatches in order, stage 1 uses them in the opposite order."""
    spec = looped_spec(2, 1, 2)
    lists = ("F0.0 F1.0 B1.0 B0.0", "F1.0 F0.0 B1.0 B0.0")
    return verify(spec, [[Action.parse(word) for word in text.split()] for text in lists])


def prove(plan: Plan) -> None:
    check_pairing(plan.layout, plan.microbatches, plan.lists, plan.order)


def legal(plan: Plan) -> bool:
    """Whether the order is a linear extension, by looking for what each action needs among all before it."""
    positions = {place[:2]: position for position, place in enumerate(plan.layout)}
    done: set[tuple[str, int, int]] = set()
    heads = [0] * plan.stages
    for stage, index in plan.order:
        op, microbatch, chunk = plan.lists[stage][index]
        position, kind = positions[stage, chunk], "g" if op in "BI" else op
        needs = {"F": ("F", microbatch, position - 1), "g": ("g", microbatch, position + 1)}.get(kind)
        if index != heads[stage] or (needs and 0 <= needs[2] < len(positions) and needs not in done):
            return False
        heads[stage] += 1
        done.add((kind, microbatch, position))
    return True


def test_an_order_is_refused_where_brute_force_refuses_it() -> None:
    refused = 0
    for seed in range(200):
        plan, random = random_plan(seed), Random(seed)
        prove(plan)
        order = list(plan.order)
        one, other = random.randrange(len(order)), random.randrange(len(order))
        order[one], order[other] = order[other], order[one]
        swapped = replace(plan, order=tuple(order))
        if legal(swapped):
            prove(swapped)
            continue
        refused += 1
        with pytest.raises(ScheduleError, match=r"comes next|not sent yet"):
            prove(swapped)
    assert 50 < refused < 200


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (("F0.0 F1.0 B0.0 B1.0", "F0.0 B0.0 F0.0 B1.0"), "stage 1, action 2: F0.0 needs a message that was received"),
        (("F0.0 F0.0 B0.0 B1.0", "F0.0 B0.0 F1.0 B1.0"), "stage 0, action 1: F0.0 sends a message that was sent"),
        (("F0.0 F1.0 B0.0 B1.0", "F0.0 B0.0 B1.0"), "1 messages are sent and never received"),
    ],
)
def test_messages_that_have_no_partner_are_found(texts: tuple[str, str], says: str) -> None:
    lists = [[Action.parse(word) for word in text.split()] for text in texts]
    order = [(0, 0), (0, 1), *((1, index) for index in range(len(lists[1]))), (0, 2), (0, 3)]
    with pytest.raises(ScheduleError, match=says):
        check_pairing(crossing().layout, 2, lists, order)


def test_an_order_that_stops_early_is_refused() -> None:
    plan = crossing()
    with pytest.raises(ScheduleError, match="the global order has 7 of 8 actions"):
        prove(replace(plan, order=plan.order[:-1]))


def test_costs_that_are_rounded_away_still_give_a_linear_extension() -> None:
    tiny = folded({"F": 1e-30, "B": 1, "I": 1})
    assert legal(tiny)
    assert tiny.order == folded({"F": 1, "B": 2, "I": 1}).order


@pytest.mark.parametrize("lookahead", [0, 1, 3, None])
def test_a_program_posts_what_its_channels_bring(lookahead: int | None) -> None:
    for seed in range(100):
        plan = random_plan(seed)
        programs = [lower(plan, stage, lookahead) for stage in range(plan.stages)]
        for target, program in enumerate(programs):
            for source, other in enumerate(programs):
                sends = [step.send for step in other if step.send and step.send.target == target != source]
                assert [message for step in program for message in step.post if message.source == source] == sends


Tamper = Callable[[list[tuple[Message, ...]]], list[tuple[Message, ...]]]


@pytest.mark.parametrize("lookahead", [1, None])
@pytest.mark.parametrize(
    ("tamper", "says"),
    [
        (lambda posts: [post[::-1] for post in posts], "message 0 from stage 0 is the activation of microbatch 0 "),
        (
            lambda posts: [(), *posts[:-1]],
            r"F1\.0 needs the activation of microbatch 1 .*, which is not posted by then",
        ),
        (
            lambda posts: [*posts[:-1], posts[0]],
            "message 2 from stage 0 is None, and the receive is for the activation",
        ),
    ],
)
def test_posts_that_would_swap_come_late_or_have_no_send_are_refused(
    lookahead: int | None, tamper: Tamper, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "_posts_in_order" if lookahead is None else "_posts_ahead"
    right = getattr(lowering, name)
    assert lower(crossing(), 1, lookahead)[0].post == lower(crossing(), 1, 1)[0].post
    monkeypatch.setattr(lowering, name, lambda *arguments: tamper(right(*arguments)))
    with pytest.raises(ScheduleError, match=says):
        lower(crossing(), 1, lookahead)


def test_a_plan_whose_order_was_changed_is_not_lowered_to_one_stream() -> None:
    plan = crossing()
    order = sorted(plan.order, key=lambda each: (-each[0], each[1]))
    with pytest.raises(ScheduleError, match="which is not posted by then"):
        lower(replace(plan, order=tuple(order)), 1, None)
