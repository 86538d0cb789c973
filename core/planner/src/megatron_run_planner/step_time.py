"""Seconds of one optimizer step: the verified action lists of a schedule, simulated with the times of its layers.

The step is the pipeline, then the reduction of gradients as far as no backward hides it, then the update. The plan is
the one that a run would execute (:mod:`megatron_run.pipeline`).

On cores that all ranks of a machine share each rank computes slower while others do: time advances from one change to
the next, where an action begins or ends, or a message arrives. Between two changes as many ranks compute as before, so
each action progresses at one speed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from megatron_run.contracts.costs import LayerCosts, LayerKinds, ModelCosts
from megatron_run.contracts.observer import Bar, Timeline
from megatron_run.contracts.schedule import Action, Place
from megatron_run.pipeline.plan import Plan, positions
from megatron_run.pipeline.simulate import simulate
from megatron_run_planner.devices import Cores, Device
from megatron_run_planner.devices.transfers import hop, sum_over
from megatron_run_planner.layer_time import (
    Passes,
    embedding_time,
    head_time,
    layer_time,
    lent_time,
    loading_time,
    sum_of,
    working_time,
)
from megatron_run_planner.layer_time.messages import once_a_step
from megatron_run_planner.layer_time.passes import CLEARED, UPDATED
from megatron_run_planner.memory.lent import Unit
from megatron_run_planner.workload import ModelSplit, rows_of_words, tables

#: Times of a model's kinds of layers.
LayerTimes = Mapping[LayerCosts, Passes]
#: What an action waits for or makes known: (is it a gradient, position of the layout that made it, microbatch).
Result = tuple[bool, int, int]
#: Parts in which a stage's gradients are reduced, at most: a bucket each.
_BUCKETS = 8
#: Sums of one number over all ranks in a step: of the metrics, of values that are not finite, of the squares of norms.
_AGREEMENTS = 3


def simulate_shared(
    plan: Plan, costs: Sequence[Mapping[str, float]], message: float, ranks: int, cores: Cores
) -> list[list[float]]:
    """When each action of each stage ends. A stage is ``ranks`` ranks that do the same at the same time.

    ``costs`` are seconds of a rank alone, per position of the layout; ``message`` is the time to another stage, during
    which nobody computes. An operation absent from ``costs`` is free.
    """
    places = {(place.stage, place.chunk): index for index, place in enumerate(plan.layout)}
    ends: list[list[float]] = [[] for _ in plan.lists]
    left: dict[int, float] = {}  # stage -> seconds of its action that are to do, at full speed
    known: set[Result] = set()
    arriving: list[tuple[float, Result]] = []
    now = 0.0
    while True:
        while arriving and arriving[0][0] <= now:
            known.add(heappop(arriving)[1])
        for stage, actions in enumerate(plan.lists):
            if stage not in left and len(ends[stage]) < len(actions):
                action = actions[len(ends[stage])]
                position = places[stage, action.chunk]
                awaited = _awaited(action, position, len(plan.layout))
                if awaited is None or awaited in known:
                    left[stage] = costs[position].get(action.op, 0.0)
        if not left and not arriving:
            return ends
        slower = cores.slower(len(left) * ranks, len(plan.lists) * ranks) if left else 1.0
        until = min([now + seconds * slower for seconds in left.values()] + [at for at, _ in arriving[:1]])
        for stage in list(left):
            left[stage] -= (until - now) / slower
        now = until
        for stage in [stage for stage, seconds in left.items() if seconds <= 1e-12]:
            del left[stage]
            action = plan.lists[stage][len(ends[stage])]
            ends[stage].append(now)
            position = places[stage, action.chunk]
            if action.op in "FBI":
                target = position + (1 if action.op == "F" else -1)
                local = not 0 <= target < len(plan.layout) or plan.layout[target].stage == stage
                heappush(arriving, (now + (0.0 if local else message), (action.op != "F", position, action.microbatch)))


def _awaited(action: Action, position: int, positions: int) -> Result | None:
    """The action at another position for which ``action`` at ``position`` waits; None if nothing."""
    if action.op == "F" and position:
        return False, position - 1, action.microbatch
    if action.op in "BI" and position + 1 < positions:
        return True, position + 1, action.microbatch
    return None


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, and where they go.

    ``pipeline`` is the time from the first forward to the last backward, of which the stages wait for the share
    ``waiting`` on average, in the bubble or because they are uneven; ``reduction`` the exposed reduction of gradients,
    ``update`` the optimizer's.
    """

    pipeline: float
    reduction: float
    update: float
    waiting: float

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.pipeline + self.reduction + self.update

    def mfu(self, model: ModelCosts, split: ModelSplit, device: Device) -> float:
        """Share of the devices' peak that the model's own FLOPs reach (Chowdhery et al. 2022, appendix B)."""
        done = model.flops_per_token * model.sequence * split.global_batch
        return done / (self.seconds * device.peak * split.ranks)


def place_times(
    model: ModelCosts, split: ModelSplit, device: Device, layout: Sequence[Place], known: LayerTimes | None = None
) -> list[Passes]:
    """Forward and backward of a microbatch at each position of ``layout``; times of layers may be ``known``."""
    known = known or {kind: layer_time(kind, split, device) for kind in model.kinds.layers}
    held = (model.part(place.layers).counts for place in layout)
    times = [sum_of(known[layer].times(count) for count, layer in counts) for counts in held]
    times[0] = times[0].then(embedding_time(model, split, device))
    times[-1] = times[-1].then(last_time(model, split, device))
    if split.lends and not model.predictors:
        times[-1] = times[-1].then(_turning(model, split, device))
    loading = loading_time(model, split, device)
    for stage in {layout[0].stage, layout[-1].stage}:
        first = next(index for index, place in enumerate(layout) if place.stage == stage)
        times[first] = times[first].then(loading)
    return times


def _turning(model: ModelCosts, split: ModelSplit, device: Device) -> Passes:
    """Seconds that the backward of the last layer saves: its last segments are still whole, beside the head."""
    layer, held = model.layers[-1], split.lending.segments_held
    work = working_time(layer, split, device)
    usual, turning = (lent_time(layer, work, split, device, turn).backward for turn in (0, max(0, held - 1)))
    return Passes(0.0, turning - usual)


def last_time(model: ModelCosts, split: ModelSplit, device: Device) -> Passes:
    """The work after the last layer: the head, and for each predictor a layer like the last one and a head."""
    head = head_time(model, split, device)
    if not model.predictors:
        return head
    block = layer_time(model.layers[-1], split, device)
    return head.then(block.then(head).times(model.predictors))


def step_time(model: ModelCosts, split: ModelSplit, device: Device, plan: Plan) -> StepTime:
    """One step of ``plan``, whose stages, chunks and microbatches are those of ``split``."""
    times = place_times(model, split, device, plan.layout)
    ends = simulated(times, model, split, device, plan)
    pipeline = max(done[-1] for done in ends)
    busy = split.microbatches * sum(each.forward + each.backward for each in times)
    update, reduction = after_backward(model, split, device, plan.layout)
    if device.cores:  # what a backward hides takes the cores from it
        update *= device.cores.slower(split.ranks, split.ranks)
        busy *= device.cores.slower(split.ranks, split.ranks)
    elif split.overlap:
        # The last microbatch's backward hides what the layers behind it send; the last bucket's comes after it.
        buckets = min(_BUCKETS, max(1, len(model.layers) // split.pipeline))
        reduction = max(reduction / buckets, reduction - times[0].backward * split.chunks)
    return StepTime(pipeline, reduction, update, max(0.0, 1 - busy / (pipeline * split.pipeline)))


def simulated(
    times: Sequence[Passes], model: ModelCosts, split: ModelSplit, device: Device, plan: Plan
) -> Sequence[Sequence[float]]:
    """When each action of each stage ends. ``times`` are those of the positions of the plan's layout."""
    costs = [
        {"F": each.forward, "B": each.backward, "I": each.backward - each.weights, "W": each.weights, "R": each.forward}
        for each in times
    ]
    message = message_time(model, split, device)
    if device.cores:
        return simulate_shared(plan, costs, message, split.of_a_stage, device.cores)
    return simulate(plan.layout, plan.microbatches, plan.lists, costs, message).ends


def step_timeline(model: ModelCosts, split: ModelSplit, device: Device, plan: Plan) -> Timeline:
    """The pipeline of one step in seconds: an action starts when its stage and its input are there."""
    ends = simulated(place_times(model, split, device, plan.layout), model, split, device, plan)
    travel, position_of, last = message_time(model, split, device), positions(plan.layout), len(plan.layout) - 1
    left = {
        ("F" if op == "F" else "B", microbatch, position_of[stage, chunk]): end
        for stage, actions in enumerate(plan.lists)
        for (op, microbatch, chunk), end in zip(actions, ends[stage], strict=True)
        if op in "FBI"
    }
    bars = []
    for stage, actions in enumerate(plan.lists):
        now, line = 0.0, list[Bar]()
        for action, end in zip(actions, ends[stage], strict=True):
            at, start = position_of[stage, action.chunk], now
            before = at - 1 if action.op == "F" else at + 1
            if action.op in "FBI" and 0 <= before <= last:
                sent = left["F" if action.op == "F" else "B", action.microbatch, before]
                start = max(now, sent + (travel if plan.layout[before].stage != stage else 0.0))
            line.append(Bar(action, start, end))
            now = end
        bars.append(tuple(line))
    makespan = max(done[-1] for done in ends)
    busy = sum(bar.end - bar.start for line in bars for bar in line)
    return Timeline(tuple(bars), makespan, 1 - busy / (makespan * plan.stages))


def estimate(
    model: ModelCosts, split: ModelSplit, device: Device, layout: Sequence[Place], known: LayerTimes | None = None
) -> float:
    """Seconds of a step with 1F1B or its interleaved form, without a simulation.

    The busiest stage runs all microbatches; the others fill and drain the pipeline once, by chunks. It is exact for
    1F1B when messages take no time, and a lower bound else; ranks that share cores are taken to be busy all the time.
    Times of layers may be ``known`` already.
    """
    times = place_times(model, split, device, layout, known)
    stages = [0.0] * split.pipeline
    for place, each in zip(layout, times, strict=True):
        stages[place.stage] += each.forward + each.backward
    around = (sum(stages) - max(stages)) / split.chunks
    hops = 2 * (split.pipeline - 1) * message_time(model, split, device)
    pipeline = split.microbatches * max(stages) + around
    slower = device.cores.slower(split.ranks, split.ranks) if device.cores else 1.0
    return slower * pipeline + hops + sum(after_backward(model, split, device, layout))


def message_time(model: ModelCosts, split: ModelSplit, device: Device) -> float:
    """Seconds until the activations of a microbatch have reached the next stage."""
    if split.pipeline == 1:
        return 0.0
    size: float = device.width * split.rows(model.tokens) * model.hidden
    if split.sequence_parallel or split.scatter_messages:
        size /= split.tensor
    return hop(device.links, size, split.of_a_stage, split.ranks)


def after_backward(
    model: ModelCosts, split: ModelSplit, device: Device, layout: Sequence[Place]
) -> tuple[float, float]:
    """Seconds of the update and of the reduction of gradients, on the stage that takes longest for both.

    The first and the last stage sum a tied embedding. With ``zero1`` and ``zero3`` each rank updates its share.
    """
    held: defaultdict[int, list[range]] = defaultdict(list)
    for place in layout:
        held[place.stage].append(place.layers)
    ends = layout[0].stage, layout[-1].stage
    kinds = set[tuple[LayerKinds, float, float]]()  # stages that hold the same take the same time
    for stage, ranges in held.items():
        first, last = (stage == end for end in ends)
        copied = model.tied and model.logits and first != last
        table = rows_of_words(model.vocabulary, split.tensor) * model.hidden / split.tensor if copied else 0.0
        kinds.add((model.part(*ranges), tables(model, split.tensor, first=first, last=last), table))
    return max((_finish(*kind, split, device) for kind in kinds), key=sum)


def _finish(layers: LayerKinds, words: float, table: float, split: ModelSplit, device: Device) -> tuple[float, float]:
    """Seconds of update and reduction on a stage that holds ``layers``, and ``words`` among which are ``table``.

    That is an embedding which another stage has too: it is reduced by itself and summed with that one.
    """
    dense = layers.weights / split.tensor + words
    experts = layers.expert_weights / split.tensor / split.expert
    parts = [Unit(size) for size in (dense - table, table) if size] + [Unit(experts=experts)] * (experts > 0)
    reduction = once_a_step(parts, split, device)
    if table:
        summed = table / split.replicas if split.shards else table  # it is reduced to a rank's share by then
        reduction += sum_over(device, split, split.gradient_bytes * summed, 2, split.ranks // 2)
    if device.links.sums:  # where steps were fitted as a whole, these are among what every step takes
        reduction += _AGREEMENTS * sum_over(device, split, 8.0, split.ranks)
        # Gloo sums whole buckets there, and parameters are gathered besides.
        if split.optimizer == "zero1" and split.replicas > 2:
            reduction += sum_over(device, split, device.width * (dense + experts) / 2, split.replicas, split.tensor)
    own = dense / split.replicas + experts * split.expert / split.replicas if split.shards else dense + experts
    cleared = own if split.lends and split.lending.reduce == "microbatch" else dense + experts
    counted = UPDATED[device.sweeps.kernels] * own + CLEARED * cleared
    moved = counted if device.sweeps.counted else device.sweeps.update * own
    update = moved / (device.bandwidth * device.sweeps.efficiency) + device.host.step
    if split.on_host and device.cores is None:  # on a processor, the update is the same
        update += _on_host(own, split, device)
    return update, reduction


def _on_host(own: float, split: ModelSplit, device: Device) -> float:
    """Seconds by which an update of ``own`` weights of a rank takes longer in host memory.

    Gradients and weights travel, none of it hidden: those of small buckets arrive when the backward has ended.
    """
    copied = own * (split.gradient_bytes + device.width) / device.host.copies
    return copied + own * UPDATED[True] / device.host.updates
