"""What a training run must have in common with its plan and with sequential; each check returns the faults it found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_run.errors import ExitCode, InputError, Problems
from megatron_run.pipeline.plan import Plan
from megatron_run.planning import resolve
from tests.integration.grid import Case, Shape
from tests.support.training import Seen

TIED = "embedding.word.weight"
LOSS_TOLERANCE = 1e-5
#: Of gradients that are added up in another order: a tied embedding's, and those of a plan that is not ascending.
GRADIENT_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Trained:
    """One case: what its ranks saw, and what the single process saw of the same training."""

    case: Case
    ranks: Sequence[Seen]
    alone: Seen

    @property
    def loss_difference(self) -> float:
        """The largest over all training steps and evaluations; not a number where one of them is not."""
        pairs = [(self.ranks[0].losses, self.alone.losses), (self.ranks[0].validation, self.alone.validation)]
        return float(np.max([np.max(np.abs(np.subtract(ours, theirs))) for ours, theirs in pairs]))

    @property
    def bit_equal(self) -> bool:
        """Whether every gradient of the first step, a tied embedding's too, is the single process's bit for bit."""
        expected = self.alone.gradients
        return all(np.array_equal(each, expected[name]) for seen in self.ranks for name, each in seen.gradients.items())

    def faults(self) -> Iterator[str]:
        """Everything that is wrong."""
        yield from plan_faults(self)
        yield from gradient_faults(self)
        yield from loss_faults(self)


def plan_faults(trained: Trained) -> Iterator[str]:
    """What ran differs from the plan in order, activations or messages."""
    yield from order_faults(trained)
    yield from peak_faults(trained)
    yield from message_faults(trained)


def order_faults(trained: Trained) -> Iterator[str]:
    """Every rank runs every step in the planned order."""
    for rank, seen in enumerate(trained.ranks):
        if len(seen.executed) != trained.case.steps:
            yield f"{trained.case}: rank {rank} ran {len(seen.executed)} steps"
        for step, executed in enumerate(seen.executed, start=1):
            if executed != seen.planned:
                yield f"{trained.case}: rank {rank}, step {step}: ran {executed}, planned {seen.planned}"


def gradient_faults(trained: Trained) -> Iterator[str]:
    """Every gradient of the first step, on every rank that holds it, is the single process's, bit for bit.

    A tied embedding's is added up in another order, and so is every one of a plan that is not ascending.
    """
    expected = trained.alone.gradients
    held = {name for seen in trained.ranks for name in seen.gradients}
    if held != expected.keys():
        yield f"{trained.case}: gradients of {sorted(held ^ expected.keys())} are on one side only"
    for rank, seen in enumerate(trained.ranks):
        for name in sorted(seen.gradients.keys() & expected.keys()):
            exact = seen.plan.ascending and not (trained.case.variant.tied and name == TIED)
            difference = float(np.max(np.abs(seen.gradients[name] - expected[name])))
            if not difference <= (0 if exact else GRADIENT_TOLERANCE):
                yield f"{trained.case}: rank {rank}: the gradient of {name} differs by {difference:.3g}"


def loss_faults(trained: Trained) -> Iterator[str]:
    """The losses of all steps and evaluations are the single process's within 1e-5, and it trains."""
    lengths = [len(seen.losses) for seen in (trained.ranks[0], trained.alone)]
    if lengths != [trained.case.steps] * 2:
        yield f"{trained.case}: {lengths} losses"
    elif not trained.loss_difference <= LOSS_TOLERANCE:
        yield f"{trained.case}: a loss differs by {trained.loss_difference:.3g}"


def peak_faults(trained: Trained) -> Iterator[str]:
    """The most activations in flight are the verifier's number, in every step."""
    for rank, seen in enumerate(trained.ranks):
        planned = seen.plan.peak_in_flight[seen.stage]
        if set(seen.peaks) != {planned}:
            yield f"{trained.case}: rank {rank} had {sorted(set(seen.peaks))} in flight, planned {planned}"


def message_faults(trained: Trained) -> Iterator[str]:
    """No message outlives its step, and a sent tensor is released as soon as it is known to be used."""
    for rank, seen in enumerate(trained.ranks):
        if any(seen.left):
            yield f"{trained.case}: rank {rank} ended steps with {max(seen.left)} messages left"
        most = most_held(seen.plan, seen.stage)
        if set(seen.held) != {most}:
            yield f"{trained.case}: rank {rank} held {sorted(set(seen.held))} sent tensors, {most} are needed"


def most_held(plan: Plan, stage: int) -> int:
    """The most tensors that ``stage`` has sent and cannot know to be used: a proof is a receive made after the use."""
    place = {(each.stage, each.chunk): position for position, each in enumerate(plan.layout)}
    #: (forward, microbatch, position) -> (stage, index in its list)
    where = {
        (action.op == "F", action.microbatch, place[of, action.chunk]): (of, index)
        for of, actions in enumerate(plan.lists)
        for index, action in enumerate(actions)
        if action.op in "FBI"
    }
    held: list[tuple[int, int]] = []
    most = 0
    for action in (action for action in plan.lists[stage] if action.op in "FBI"):
        forward, position = action.op == "F", place[stage, action.chunk]
        step = 1 if forward else -1
        source = where.get((forward, action.microbatch, position - step))
        if source and source[0] != stage:
            held = [use for use in held if use[0] != source[0] or use[1] > source[1]]
        use = where.get((forward, action.microbatch, position + step))
        if use and use[0] != stage:
            held.append(use)
        most = max(most, len(held))
    return most


def refusal_faults(shape: Shape) -> Iterator[str]:
    """A shape that its schedule does not promise to run is the user's mistake, and each problem says what to type."""
    try:
        resolve(Case(shape).request)
    except Problems as found:
        for problem in found.problems:
            if not (isinstance(problem, InputError) and problem.exit_code == ExitCode.INPUT and problem.fix):
                yield f"{shape}: {type(problem).__name__}, exit code {problem.exit_code}: {problem}"
    else:
        yield f"{shape} is not refused"
