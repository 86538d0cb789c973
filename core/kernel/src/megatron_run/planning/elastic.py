"""With how many ranks a run trains that has fewer than it wants, or more: ``run.elastic``. Pure arithmetic.

The global batch, and every one of a ramp-up, stays as it is: another number of copies of the model accumulates more
microbatches, or fewer. Ranks beyond those that fit are *spares*, which neither train nor fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import TYPE_CHECKING

from megatron_run.errors import InputError
from megatron_run.planning.rank_grid import MAX_RANKS, copy_ranks, shown_axes

if TYPE_CHECKING:
    from megatron_run.contracts.schema import GuardSection, ParallelSection, RunSection, TrainSection
    from megatron_run.planning.run import ResolvedRun


def most_ranks(parallel: ParallelSection, nproc: int | None, there: int | None) -> int | None:
    """The most ranks with which an elastic run may train; None where nothing but its sizes says how many.

    ``nproc`` and ``parallel.data`` are what is wanted in full strength.
    """
    wanted = copy_ranks(parallel) * parallel.data if parallel.data is not None else None
    return min((ranks for ranks in (nproc, there, wanted) if ranks is not None), default=None)


def data_sizes(parallel: ParallelSection, train: TrainSection, most: int, least: int) -> tuple[int, ...]:
    """The sizes of the data axis with which ``least`` to ``most`` ranks can train, the largest first.

    All other axes stay. ``parallel.expert`` divides each of them, and each with ``train.micro_batch_size`` the global
    batch.
    """
    unit, shared = copy_ranks(parallel), _shared_batch(train)
    if shared % train.micro_batch_size:
        return ()
    shares = shared // train.micro_batch_size
    largest = min(most // unit, shares)
    return tuple(
        data
        for data in range(largest, 0, -1)
        if not shares % data and not data % parallel.expert and unit * data >= least
    )


def strengths(
    run: RunSection, parallel: ParallelSection, train: TrainSection, most: int
) -> tuple[ParallelSection, ...]:
    """``parallel`` with each of :func:`data_sizes`, the best first. Raises :class:`InputError` where nothing fits."""
    if not 1 <= most <= MAX_RANKS:
        raise InputError(f"a run of {most} ranks was asked for", fix=f"ask for 1 to {MAX_RANKS}")
    sizes = data_sizes(parallel, train, most, run.min_ranks)
    if not sizes:
        raise _nothing_fits(run, parallel, train, most)
    return tuple(parallel.model_copy(update={"data": data}) for data in sizes)


def check_excluding(run: RunSection, guard: GuardSection) -> None:
    """Raise :class:`InputError` where ``guard.exclude`` needs what the run does not do."""
    asked, fix = f"guard.exclude={','.join(guard.exclude)}", "or leave guard.exclude out"
    if guard.exclude and run.elastic == "off":
        why = "run.elastic=off needs all of them"
        raise InputError(f"{asked} leaves out ranks", why=why, fix=f"set run.elastic=data, {fix}")
    if "differing" in guard.exclude and not guard.replica_interval.amount:
        why = "guard.replica_interval=0 compares none"
        raise InputError(f"{asked} leaves out ranks that differ", why=why, fix=f"set it to a number of steps, {fix}")
    if "slow" in guard.exclude and not guard.straggler_interval.amount:
        why = "guard.straggler_interval=0 compares none"
        raise InputError(f"{asked} leaves out ranks that are slow", why=why, fix=f"set it to a number of steps, {fix}")


def choice_notice(run: ResolvedRun, wanted: int = 0) -> str:
    """The line about the layout that ``run.elastic`` chose for ``run``; empty in full strength without spares.

    ``wanted`` are the ranks by ``parallel.data``, which decide where nothing else does.
    """
    policy, sizes, spares = run.config.run.elastic, run.sizes, run.spares
    if run.request.there is None and run.request.nproc is None:
        spares = max(0, wanted - sizes.world)
    if policy == "off" or (run.request.there is None and not spares):
        return ""
    names = ("tensor", "context", "pipeline", "data", "expert")
    axes = {name: getattr(sizes, name) for name in names}
    layout = " x ".join(f"{name} {size}" for name, size in axes.items() if size > 1 or name == "data")
    most = max(run.plans, default=0)
    each = f"{most} microbatch{'es' if most > 1 else ''} a step"
    line = f"run.elastic={policy}: {sizes.world} of {sizes.world + spares} ranks train as {layout}, {each}"
    why = {
        "data": "as the global batch divides over no more of those wanted",
        "plan": "as no layout of more is predicted to be faster",
    }
    left = f"{spares} {'is' if spares == 1 else 'are'} spare, {why[policy]}"
    return f"{line}; {left}" if spares else line


def _shared_batch(train: TrainSection) -> int:
    """The samples of which every global batch of the run is a multiple."""
    ramp = train.ramp_up
    if ramp is None or ramp.start == train.global_batch_size:
        return train.global_batch_size
    return gcd(train.global_batch_size, ramp.start, ramp.increment)


def _nothing_fits(run: RunSection, parallel: ParallelSection, train: TrainSection, most: int) -> InputError:
    unit, every = copy_ranks(parallel), data_sizes(parallel, train, MAX_RANKS, 1)
    axes = " x ".join(f"parallel.{axis} {getattr(parallel, axis)}" for axis in shown_axes(parallel))
    if not every:
        micro, experts = train.micro_batch_size, parallel.expert
        shared = f"{_shared_batch(train)} samples, which divide all global batches"
        return InputError(
            f"no number of ranks trains this run: train.micro_batch_size={micro} x parallel.expert={experts} does not "
            f"divide {shared}",
            fix="change train.global_batch_size, or that of the ramp-up",
        )
    worlds = sorted(unit * data for data in every)
    what = f"a copy takes {axes} = {unit}"
    possible = f"this run trains on {_listed(worlds)} ranks, where {what} and the global batch divides"
    few = f"{most} ranks are too few" if most > 1 else "1 rank is too few"
    fitting = [world for world in worlds if world <= most]
    if fitting:
        why = f"{possible}; run.min_ranks={run.min_ranks} leaves none"
        return InputError(few, why=why, fix=f"set run.min_ranks to {fitting[-1]} or less")
    return InputError(few, why=possible, fix=f"start {worlds[0]} or more")


def _listed(worlds: Sequence[int], shown: int = 6) -> str:
    more = len(worlds) - shown
    return ", ".join(map(str, worlds[:shown])) + (f" and {more} other numbers of" if more > 0 else "")
