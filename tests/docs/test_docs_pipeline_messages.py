"""The page on pipeline messages is right: the nine operations of the textbook loops are found in lowered lists."""

from __future__ import annotations

import re
import runpy
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import product

import pytest

from megatron_run.contracts import Schedule
from megatron_run.contracts.schedule import Action
from megatron_run.pipeline.lower import Instruction, Message, lower
from megatron_run.pipeline.verify import verify
from megatron_run_schedule_1f1b import OneForwardOneBackward
from megatron_run_schedule_interleaved import Interleaved
from tests.docs.textbook_loops import OPERATIONS, Call, interleaved, one_forward_one_backward, parts
from tests.support.checkout import ROOT
from tests.support.random_schedules import looped_spec

PAGE = (ROOT / "docs" / "pipeline-messages.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^- `(\w+)`: (.*)$", PAGE, re.MULTILINE)
#: (stages, microbatches) and (stages, chunks, microbatches).
PLAIN = [(p, m) for p, m in product((1, 2, 3, 4), (1, 2, 3, 5, 8))]
CHUNKED = [(p, v, k * p) for p, v, k in product((2, 3, 4), (2, 3), (1, 2, 3))]

#: A send or the wait for a message: ("send" or "recv", the message).
Step = tuple[str, Message]


def lowered(schedule: Schedule, stages: int, chunks: int, microbatches: int) -> list[tuple[Instruction, ...]]:
    spec = looped_spec(stages, chunks, microbatches)
    plan = verify(spec, schedule.actions(spec))
    return [lower(plan, stage) for stage in range(stages)]


def carried_out(program: Iterable[Instruction]) -> Iterator[Action | Step]:
    """What a stage does, in order: it waits, computes, sends."""
    for instruction in program:
        if instruction.receive:
            yield "recv", instruction.receive
        yield instruction.action
        if instruction.send:
            yield "send", instruction.send


def written_out(loop: Iterable[Action | Call], stage: int, stages: int, chunks: int) -> Iterator[Action | Step]:
    """The same of a textbook loop: each operation taken apart by its name, less what has no other end."""
    for step in loop:
        if isinstance(step, Action):
            yield step
            continue
        for verb, actions in (("send", step.sent), ("recv", step.received)):
            for action in actions:
                assert {"F": "forward", "B": "backward"}[action.op] in parts(step.operation)[verb], step
                message = crossing(verb, action, stage, stages, chunks)
                if message:
                    yield verb, message


def crossing(verb: str, action: Action, stage: int, stages: int, chunks: int) -> Message | None:
    """The input or the result of ``action`` on ``stage``: pieces go round the stages."""
    here = action.chunk * stages + stage
    there = here + (1 if (action.op == "F") == (verb == "send") else -1)
    if not 0 <= there < stages * chunks:
        return None
    source, target = (here, there) if verb == "send" else (there, here)
    return Message("x" if action.op == "F" else "g", action.microbatch, source % stages, target % stages, target)


@pytest.mark.parametrize(("stages", "microbatches"), PLAIN)
def test_a_lowered_1f1b_is_the_textbook_loop(stages: int, microbatches: int) -> None:
    for stage, program in enumerate(lowered(OneForwardOneBackward(), stages, 1, microbatches)):
        loop = one_forward_one_backward(stage, stages, microbatches)
        assert list(carried_out(program)) == list(written_out(loop, stage, stages, 1))


@pytest.mark.parametrize(("stages", "chunks", "microbatches"), CHUNKED)
def test_a_lowered_interleaved_sends_no_later_and_waits_no_earlier(stages: int, chunks: int, microbatches: int) -> None:
    """Actions are equal, messages on each channel are in the same order; what was fused only moves towards its use."""
    for stage, program in enumerate(lowered(Interleaved(), stages, chunks, microbatches)):
        ours = list(carried_out(program))
        theirs = list(written_out(interleaved(stage, stages, chunks, microbatches), stage, stages, chunks))
        assert channels(ours) == channels(theirs)
        moments, textbook = moment(ours), moment(theirs)
        assert all(moments[step] <= textbook[step] for step in moments if step[0] == "send")
        assert all(moments[step] >= textbook[step] for step in moments if step[0] == "recv")


def channels(steps: Iterable[Action | Step]) -> dict[object, list[object]]:
    """What is computed, and what is sent and awaited on each directed channel, in order."""
    found: dict[object, list[object]] = defaultdict(list)
    for step in steps:
        key = "actions" if isinstance(step, Action) else (step[0], step[1].source, step[1].target)
        found[key].append(step)
    return found


def moment(steps: Iterable[Action | Step]) -> dict[Step, int]:
    """The number of actions before each send and each wait."""
    done, found = 0, {}
    for step in steps:
        if isinstance(step, Action):
            done += 1
        else:
            found[step] = done
    return found


def test_the_page_composes_four_operations_and_names_all_nine() -> None:
    words = {
        ("send", "forward"): "send x to p+1",
        ("send", "backward"): "send g to p-1",
        ("recv", "forward"): "post, wait x from p-1",
        ("recv", "backward"): "post, wait g from p+1",
    }
    assert dict(ROWS) == {f"{verb}_{way}": composition for (verb, way), composition in words.items()}
    assert not [operation for operation in OPERATIONS if f"`{operation}`" not in PAGE]


def test_the_loops_call_all_nine_operations() -> None:
    plain = {step for p, m in PLAIN for stage in range(p) for step in called(one_forward_one_backward(stage, p, m))}
    chunked = {step for p, v, m in CHUNKED for stage in range(p) for step in called(interleaved(stage, p, v, m))}
    assert plain | chunked == set(OPERATIONS)


def called(loop: Iterable[Action | Call]) -> set[str]:
    return {step.operation for step in loop if isinstance(step, Call)}


def test_the_page_shows_what_the_program_prints(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "tests/examples/messages/stage_program.py"))
    assert f"```text\n{capsys.readouterr().out}```\n" in PAGE


def test_a_steady_pair_of_1f1b_is_send_forward_recv_backward() -> None:
    """Stage 1 of 4: the forward sends up, the backward waits for the gradient from above; nothing else crosses."""
    program = lowered(OneForwardOneBackward(), 4, 1, 8)[1]
    forward, backward = program[4:6]
    assert (str(forward.action), str(backward.action)) == ("F3.0", "B1.0")
    assert forward.send == Message("x", 3, 1, 2, 2)
    assert backward.receive == Message("g", 1, 2, 1, 1)


def test_receives_are_posted_before_the_action_that_needs_them() -> None:
    """All but the very first: nothing can be posted before the first action."""
    for program in lowered(OneForwardOneBackward(), 4, 1, 8):
        posted: set[Message] = set()
        for index, instruction in enumerate(program):
            assert instruction.receive is None or index == 0 or instruction.receive in posted
            posted.update(instruction.post)
