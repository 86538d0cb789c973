"""The search as a whole: deal the layers out over places, make lists by rules, improve the best.

Dealing out comes first, because a stage with more work than the others keeps them waiting in any order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from megatron_run.contracts.schedule import Action, Place
from megatron_run.errors import InputError
from megatron_run.errors.wording import plural
from megatron_run_planner.schedules.greedy import Habit, greedy_lists, habits
from megatron_run_planner.schedules.installed import spread
from megatron_run_planner.schedules.polish import makespan, polished, split
from megatron_run_planner.schedules.workload_costs import Pipeline, Placed

#: Dealings that get lists by rules, of these the lists that are improved, and how many habits are disturbed.
_DEALINGS, _IMPROVED, _DISTURBED = 4, 3, 40
#: Actions visited by all simulations together, about a microsecond each.
EFFORT = 4_000_000


@dataclass(frozen=True)
class Found:
    """Lists of actions, and the ``seconds`` of a step with them; no order of these places takes less than ``bound``."""

    placed: Placed
    lists: tuple[tuple[Action, ...], ...]
    seconds: float

    @property
    def bound(self) -> float:
        """Seconds of :attr:`Placed.bound`."""
        return self.placed.bound


def search_schedule(
    pipeline: Pipeline,
    counts: Sequence[int] = (),
    starts: Sequence[tuple[Sequence[Place], Sequence[Sequence[Action]]]] = (),
    *,
    seed: int = 0,
    effort: int = EFFORT,
) -> Found:
    """The shortest step that is found for ``pipeline``: the same for the same arguments, in seconds.

    ``counts`` fixes the layers of each place in model order. ``starts`` are layouts and lists of other schedules, which
    the answer does not fall behind where they fit the memory. Raises :class:`InputError` when nothing fits.
    """
    random = Random(seed)
    found = list(_by_rules(pipeline, counts, random, effort // 4))
    for layout, lists in starts:
        placed, halves = pipeline.placed(layout), tuple(map(tuple, map(split, lists)))
        if placed.fits(halves):
            found.append(Found(placed, halves, makespan(placed, halves)))
    if not found:
        raise InputError(
            f"no order of {plural(pipeline.microbatches, 'microbatch')} over {plural(pipeline.stages, 'stage')} fits",
            why=f"a rank has {pipeline.memory / 2**30:.1f} GiB for state and activations",
            fix="take more stages, a smaller microbatch, or recompute",
        )
    found.sort(key=lambda each: each.seconds)
    tries = effort // (3 * pipeline.microbatches * len(found[0].placed.layout)) // _IMPROVED
    better = [_improved(each, random, tries) for each in found[:_IMPROVED]]
    return min(better, key=lambda each: each.seconds)


def _by_rules(pipeline: Pipeline, counts: Sequence[int], random: Random, effort: int) -> Iterator[Found]:
    """The best lists by rules for each of the best dealings."""
    each = 10 * pipeline.microbatches * pipeline.stages * pipeline.chunks  # what one run of rules visits, about
    runs = max(12, effort // each // _DEALINGS)
    for placed in dealings(pipeline, counts)[:_DEALINGS]:
        tried = sorted((_ruled(placed, habit) for habit in list(habits(len(placed.layout)))[:runs]), key=_seconds)
        for _ in range(min(_DISTURBED, runs - len(tried))):
            habit = random.choice(tried[:6])[0].disturbed(random)
            tried.append(_ruled(placed, habit))
            tried.sort(key=_seconds)
        yield tried[0][1]


def _ruled(placed: Placed, habit: Habit) -> tuple[Habit, Found]:
    lists = tuple(map(tuple, greedy_lists(placed, habit)))
    return habit, Found(placed, lists, makespan(placed, lists))


def _seconds(pair: tuple[Habit, Found]) -> float:
    return pair[1].seconds


def _improved(found: Found, random: Random, tries: int) -> Found:
    lists = tuple(map(tuple, polished(found.placed, found.lists, random, tries)))
    return Found(found.placed, lists, makespan(found.placed, lists))


def dealings(pipeline: Pipeline, counts: Sequence[int] = ()) -> list[Placed]:
    """Ways to place the layers, the one with the lowest bound first; those that fit no microbatch are left out."""
    found: dict[tuple[Place, ...], Placed] = {}
    for shape in shapes(pipeline.stages, pipeline.chunks):
        for placed in [_deal(pipeline, shape, counts)] if counts else _descent(pipeline, shape):
            found.setdefault(placed.layout, placed)
    return sorted((each for each in found.values() if not each.overfull), key=_merit)


def shapes(stages: int, chunks: int) -> list[list[tuple[int, int]]]:
    """(stage, chunk) of each place in model order: every chunk down the stages, or by turns down and up."""
    loop = [(index % stages, index // stages) for index in range(stages * chunks)]
    turns = [(stages - 1 - stage if chunk % 2 else stage, chunk) for stage, chunk in loop]
    return [loop] if turns == loop else [turns, loop]


def _deal(pipeline: Pipeline, shape: Sequence[tuple[int, int]], counts: Sequence[int]) -> Placed:
    starts = [sum(counts[:index]) for index in range(len(counts))]
    places = zip(shape, starts, counts, strict=True)
    return pipeline.placed([Place(*where, range(start, start + count)) for where, start, count in places])


def _descent(pipeline: Pipeline, shape: Sequence[tuple[int, int]]) -> Iterator[Placed]:
    """From an even spread on, move one layer at a time from a place of the fullest stage to another."""
    if len(pipeline.layers) < len(shape):
        raise InputError(
            f"{plural(len(pipeline.layers), 'layer')} are fewer than {len(shape)} places",
            fix="lower parallel.pipeline or parallel.chunks",
        )
    counts = list(spread(len(pipeline.layers), len(shape)))
    now = _deal(pipeline, shape, counts)
    yield now
    while True:
        fullest = max(range(pipeline.stages), key=lambda stage: now.works and now.loads[stage])
        near = [
            _moved(counts, source, target)
            for source in range(len(shape))
            for target in range(len(shape))
            if source != target and counts[source] > 1 and fullest in (shape[source][0], shape[target][0])
        ]
        tried = [
            (_merit(placed), index, placed) for index, placed in enumerate(_deal(pipeline, shape, n) for n in near)
        ]
        if not tried or min(tried)[0] >= _merit(now):
            return
        _, index, now = min(tried, key=lambda each: each[:2])
        counts = near[index]
        yield from (placed for _, _, placed in sorted(tried, key=lambda each: each[:2])[:_DEALINGS])


def _moved(counts: Sequence[int], source: int, target: int) -> list[int]:
    changed = list(counts)
    changed[source] -= 1
    changed[target] += 1
    return changed


def _merit(placed: Placed) -> tuple[float, float, float]:
    """Less is better: bytes that miss, seconds that no order beats, and how uneven the stages are."""
    return placed.overfull, placed.bound, sum(load * load for load in placed.loads)
