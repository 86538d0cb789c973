"""Arbitrary legal schedules: random linear extensions of the action graph, projected on the stages.

They are what a third party might write: no warm-up, no symmetry, B mixed with I and W, whichever chunk first.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from megatron_run.contracts.schedule import Action, LayoutSpec, Place, ScheduleSpec, looped_layout, split_layers
from megatron_run.pipeline.plan import Plan
from megatron_run.pipeline.verify import verify

#: One action by position instead of chunk: (operation, microbatch, position).
Node = tuple[str, int, int]

#: A function that places layers.
Layout = Callable[[LayoutSpec], tuple[Place, ...]]


def vee_layout(spec: LayoutSpec) -> tuple[Place, ...]:
    """Down the stages with one chunk, up with the next: neighbouring chunks meet on one stage."""
    places = []
    for index, layers in enumerate(split_layers(spec)):
        chunk, step = divmod(index, spec.stages)
        places.append(Place(spec.stages - 1 - step if chunk % 2 else step, chunk, layers))
    return tuple(places)


def looped_spec(stages: int, chunks: int, microbatches: int) -> ScheduleSpec:
    """The shape of a step in which chunks go round the stages, with one layer a place."""
    return ScheduleSpec(looped_layout(LayoutSpec(stages, chunks, stages * chunks)), stages, chunks, microbatches)


def random_spec(random: Random, *, stages: int | None = None) -> ScheduleSpec:
    """A random shape, looped or V-shaped, with one layer a place; ``stages`` fixes the number of stages."""
    stages = stages or random.randint(1, 4)
    chunks, microbatches = random.randint(1, 3), random.randint(1, 6)
    layout = random.choice((looped_layout, vee_layout))(LayoutSpec(stages, chunks, stages * chunks))
    return ScheduleSpec(layout, stages, chunks, microbatches)


def random_lists(spec: ScheduleSpec, random: Random) -> list[list[Action]]:
    """Any order that the action graph allows; each backward is one B, or I and W, at random."""
    needs = _action_graph(spec, random)
    done: set[Node] = set()
    lists: list[list[Action]] = [[] for _ in range(spec.stages)]
    while len(done) < len(needs):
        op, microbatch, position = node = random.choice(
            [node for node, needed in needs.items() if node not in done and needed <= done]
        )
        done.add(node)
        place = spec.layout[position]
        lists[place.stage].append(Action.parse(f"{op}{microbatch}.{place.chunk}"))
    return lists


def random_plan(seed: int, *, stages: int | None = None) -> Plan:
    """The verified plan of one random schedule; the same seed gives the same plan."""
    random = Random(seed)
    spec = random_spec(random, stages=stages)
    return verify(spec, random_lists(spec, random))


def _action_graph(spec: ScheduleSpec, random: Random) -> dict[Node, set[Node]]:
    """Every action and the actions it needs."""
    last = len(spec.layout) - 1
    needs: dict[Node, set[Node]] = {}
    for microbatch in range(spec.microbatches):
        backward = {position: random.choice("BI") for position in range(last + 1)}
        for position in range(last + 1):
            forward: Node = ("F", microbatch, position)
            needs[forward] = {("F", microbatch, position - 1)} if position else set()
            after: set[Node] = {(backward[position + 1], microbatch, position + 1)} if position < last else set()
            needs[backward[position], microbatch, position] = {forward} | after
            if backward[position] == "I":
                needs["W", microbatch, position] = {("I", microbatch, position)}
    return needs
