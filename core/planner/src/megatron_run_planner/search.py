"""Finds the fastest split of a model over devices: all that fit, ranked by a closed form, the best by simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import inf, isqrt

from megatron_run.contracts.costs import ModelCosts
from megatron_run.contracts.schedule import LayoutSpec, looped_layout
from megatron_run.errors import InputError, RunError
from megatron_run.pipeline.plan import Plan
from megatron_run_planner.devices import Device
from megatron_run_planner.layer_time import lent_time, mean_layer, working_time
from megatron_run_planner.memory import RankMemory, least_memory, stage_memory
from megatron_run_planner.schedules import LARGEST, Schedules, spread
from megatron_run_planner.split_samples import METHODS, short, why_not
from megatron_run_planner.step_time import LayerTimes, StepTime, estimate, step_time
from megatron_run_planner.workload import ONE_RANK, OPTIMIZERS, ModelSplit, Optimizer, Recompute, split_over

#: Chunks a stage that are tried, microbatch sizes, and how much is simulated: splits, and actions of all their lists.
CHUNKS = (1, 2, 3, 4, 5, 6, 7, 8)
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
RECOMPUTED: tuple[Recompute, ...] = ("none", "mlp", "full")
SIMULATED, ACTIONS = 40, 400_000
#: Part of a step by which optimizer zero3 must be faster where zero1 fits too: it sends more.
GAIN = 0.02


@dataclass(frozen=True)
class Candidate:
    """One way to run: a split and a schedule, with what it is predicted to take.

    ``shares`` are parts of the step: what stages wait for each other (``waiting``: the bubble, and uneven stages),
    tensor-parallel and expert traffic (``layer traffic``), recomputation, exposed gradient reduction, update. The rest
    computes. ``plan`` is what a run would execute.
    """

    split: ModelSplit
    schedule: str
    step: StepTime
    memory: tuple[RankMemory, ...]
    shares: dict[str, float]
    plan: Plan

    @property
    def tensors(self) -> float:
        """Bytes of tensors on the fullest stage."""
        return max(each.total for each in self.memory)

    @property
    def needed(self) -> float:
        """Bytes of device memory on the fullest stage: its tensors and the reserve."""
        return max(each.needed() for each in self.memory)

    @property
    def uneven(self) -> tuple[int, ...]:
        """The layers of each place in model order, as ``parallel.layers`` has them; empty where they are even."""
        counts = tuple(len(place.layers) for place in self.plan.layout)
        return counts if len({*counts}) > 1 else ()

    @property
    def limit(self) -> str:
        """The largest share that is no computation."""
        return max(self.shares, key=lambda name: self.shares[name])


@dataclass(frozen=True)
class Choice:
    """The best candidates, fastest first, and how many others were left out for which reason."""

    best: tuple[Candidate, ...]
    pruned: Counter[str]
    tried: int


@dataclass(frozen=True)
class Growth:
    """How a batch grows: first batch and increment, which are ``dealt`` to the ranks, and the smaller ``batches``."""

    dealt: tuple[int, ...] = ()
    batches: tuple[int, ...] = ()

    def undealt(self, split: ModelSplit) -> list[int]:
        """The sizes that do not divide into microbatches over the data-parallel ranks of ``split``."""
        return [size for size in (*self.dealt, *self.batches) if size % (split.micro_batch * split.data)]


#: The growth of a batch that is the same in every step.
STEADY = Growth()


@dataclass(frozen=True)
class Open:
    """From which optimizers and sizes of a microbatch a search may choose."""

    optimizers: tuple[Optimizer, ...] = OPTIMIZERS
    micro_batches: tuple[int, ...] = MICRO_BATCHES


class Search:
    """Searches the splits of ``model`` over ``ranks`` of ``device``, of which each has ``memory`` bytes.

    By the end of its ``growth`` the batch is ``global_batch``. Graph capture and lending are those of ``like``. Of the
    optimizers that are ``left`` open ``zero3`` is tried where ``zero1`` does not fit, or is slower by a ``GAIN``.
    """

    def __init__(
        self,
        model: ModelCosts,
        ranks: int,
        global_batch: int,
        device: Device,
        schedules: Schedules,
        growth: Growth = STEADY,
        *,
        like: ModelSplit = ONE_RANK,
        left: Open = Open(),
    ) -> None:
        self._growth, self._like, self._optimizers = growth, like, left.optimizers
        # Samples that ranks split are not batched, unless the size is given.
        self._micro_batches, self._given = left.micro_batches, len(left.micro_batches) == 1
        self._model, self._ranks, self._batch = model, ranks, global_batch
        self._device, self._schedules = device, schedules
        self._pruned: Counter[str] = Counter()
        self._layers: dict[tuple[object, ...], LayerTimes] = {}
        self._needed: dict[ModelSplit, float] = {}

    def run(self, keep: int = 10) -> Choice:
        """The best ``keep`` candidates. Raises :class:`InputError`, with what is nearest, when nothing fits."""
        splits = list(self._splits())
        fitting = [split for split in splits if self._fits(split)]
        if not fitting:
            raise self._nothing_fits(splits)
        ranked = sorted(fitting, key=self._estimate)
        found: list[Candidate] = []
        actions = done = 0
        for split in ranked:
            cost = 2 * split.microbatches * split.chunks * split.pipeline
            if done and (done >= SIMULATED or actions + cost > ACTIONS):
                self._pruned["slower by the closed form, so not simulated"] += 1
                continue
            candidates = self._judged(split)
            if split.optimizer == "zero1" and "zero3" in self._optimizers:
                candidates += self._lent_too(split, candidates)
            if candidates:
                found += candidates
                done, actions = done + 1, actions + cost * len(candidates)
        if not found:
            raise self._nothing_fits(fitting)
        found.sort(key=lambda each: each.step.seconds)
        best = tuple(islice(filter(self._grows, found), keep))
        if not best:
            raise InputError(
                f"no schedule of a split that fits takes all {len(self._growth.batches) + 1} batches of train.ramp_up",
                why=f"the smallest is {self._growth.batches[0]} samples",
                fix="raise train.ramp_up.start and its increment",
            )
        return Choice(best, self._pruned, len(splits))

    def _grows(self, candidate: Candidate) -> bool:
        """Whether the schedule takes every batch of the growth; one that does not is counted."""
        try:
            self._check_growth(candidate.split, candidate.schedule)
        except RunError:
            self._pruned[f"smaller batches refused by schedule {candidate.schedule}"] += 1
            return False
        return True

    def _check_growth(self, split: ModelSplit, schedule: str, counts: Sequence[int] = ()) -> None:
        """Raise :class:`InputError` where a smaller batch is refused."""
        for batch in self._growth.batches:
            self._plan(replace(split, global_batch=batch), schedule, counts)

    def _judged(self, split: ModelSplit) -> list[Candidate]:
        return [each for each in map(self.judge, *zip(*self._options(split), strict=True)) if each]

    def _lent_too(self, split: ModelSplit, found: Sequence[Candidate]) -> list[Candidate]:
        """``split`` with ``zero3`` where no schedule of it was ``found`` to fit, or all are slower by a ``GAIN``."""
        lent = replace(split, optimizer="zero3")
        fastest = min((each.step.seconds for each in found), default=inf)
        return self._judged(lent) if self._estimate(lent) < (1 - GAIN) * fastest else []

    def judge(self, split: ModelSplit, schedule: str) -> Candidate | None:
        """``split`` under ``schedule``, None when the schedule refuses or the memory does not suffice."""
        try:
            plan = self._plan(split, schedule)
        except RunError:
            self._pruned[f"refused by schedule {schedule}"] += 1
            return None
        if max(each.needed() for each in stage_memory(self._model, split, plan)) > self._device.memory:
            self._pruned["more memory in flight than there is"] += 1
            return None
        return self.candidate(split, schedule, plan)

    def describe(self, split: ModelSplit, schedule: str, counts: Sequence[int] = ()) -> Candidate:
        """``split`` under ``schedule``, whether it fits or not; ``counts`` are the layers of each place, if set.

        Raises :class:`InputError` when it is refused.
        """
        self._check_growth(split, schedule, counts)
        return self.candidate(split, schedule, self._plan(split, schedule, counts))

    def _plan(self, split: ModelSplit, schedule: str, counts: Sequence[int] = ()) -> Plan:
        shape = split.pipeline, split.chunks, split.microbatches
        return self._schedules.plan(schedule, len(self._model.layers), *shape, counts)

    def candidate(self, split: ModelSplit, schedule: str, plan: Plan) -> Candidate:
        """``split`` as ``plan`` runs it, which ``schedule`` made."""
        memory = tuple(stage_memory(self._model, split, plan))
        step = step_time(self._model, split, self._device, plan)
        return Candidate(split, schedule, step, memory, shares(self._model, split, self._device, step), plan)

    def _options(self, split: ModelSplit) -> list[tuple[ModelSplit, str]]:
        """``split`` with every installed schedule that serves its stages and chunks."""
        if split.pipeline == 1:
            return [(split, "sequential")]
        return [(split, name) for name in self._schedules.serving(split.chunks)]

    def _splits(self) -> Iterator[ModelSplit]:
        """Every split whose sizes divide; what does not is counted."""
        model, links = self._model, self._device.links
        for tensor in _divisors(self._ranks):
            if tensor > links.machine:
                self._pruned["tensor ranks beyond one machine"] += 1
                continue
            try:
                split_over(model, tensor)
            except InputError:
                self._pruned["heads or features do not divide over tensor ranks"] += 1
                continue
            for context in self._context_ranks(tensor):
                others = self._ranks // tensor // context
                for pipeline in _divisors(others):
                    if pipeline > len(model.layers):
                        self._pruned["more stages than layers"] += 1
                        continue
                    sizes = ModelSplit(tensor=tensor, context=context, pipeline=pipeline, data=others // pipeline)
                    for split in self._batched(sizes):
                        yield from self._by_optimizer(split)

    def _context_ranks(self, tensor: int) -> Iterator[int]:
        """The numbers of ranks over which samples may be split: powers of two, of samples that are no shorter."""
        yield 1
        context = 2
        while self._model.computes_pieces and not self._ranks // tensor % context:
            split = ModelSplit(tensor=tensor, context=context, sequence_parallel=tensor > 1)
            if short(self._model, split):
                self._pruned["samples too short to be split over ranks"] += 1
                return
            if not why_not(self._model, split):
                yield context
            context *= 2

    def _by_optimizer(self, split: ModelSplit) -> Iterator[ModelSplit]:
        """``split`` with each optimizer; with ``zero3``, which sends more, where the one before it does not fit."""
        fits = False
        for optimizer in self._optimizers if split.replicas > 1 else self._optimizers[:1]:
            if optimizer == "zero3" and fits:
                return
            found = self._by_method(split if optimizer == split.optimizer else replace(split, optimizer=optimizer))
            yield found
            fits = optimizer == "zero1" and self._least(found) <= self._device.memory

    def _by_method(self, split: ModelSplit) -> ModelSplit:
        """``split`` with the fastest method that fits by which the tokens of a sample meet, if ranks split them."""
        if split.context == 1:
            return split
        ways = (replace(split, method=method) for method in METHODS)
        able = [way for way in ways if not why_not(self._model, way)]
        return min(able, key=lambda way: (self._least(way) > self._device.memory, self._seconds(way)))

    def _expert_ranks(self, data: int) -> list[int]:
        """The numbers of ranks over which experts may be split; a graph holds no tokens that travel among them."""
        whole = not self._model.experts or self._like.one_graph
        return [1] if whole else [each for each in _divisors(data) if not self._model.experts % each]

    def _batched(self, sizes: ModelSplit) -> Iterator[ModelSplit]:
        """The splits with these sizes of the axes.

        Samples that ranks split are not batched: of two on each rank, halves of four ranks have as many tokens, and
        exchange more than the whole ones of two.
        """
        model, pipeline, data = self._model, sizes.pipeline, sizes.data
        chunks = [each for each in CHUNKS if each == 1 or (pipeline > 1 and self._even(pipeline * each))]
        experts = self._expert_ranks(data)
        for micro_batch in self._micro_batches if sizes.context == 1 or self._given else (1,):
            if self._batch % (micro_batch * data):
                self._pruned["the global batch does not divide"] += 1
                continue
            base = replace(
                sizes,
                micro_batch=micro_batch,
                global_batch=self._batch,
                sequence_parallel=sizes.tensor > 1,
                overlap=True,
                gradient_bytes=4,
                one_graph=self._like.one_graph,
                lending=self._like.lending,
                on_host=self._like.on_host,
            )
            if why := base.no_graph:
                self._pruned[why] += 1
                continue
            if self._growth.undealt(base):
                self._pruned["train.ramp_up does not divide"] += 1
                continue
            for each in chunks:
                if 2 * base.microbatches * each * pipeline > LARGEST:
                    self._pruned["more microbatches than can be simulated"] += 1
                    continue
                for expert in experts:
                    for recompute in RECOMPUTED if not model.experts else ("none", "full"):
                        yield replace(base, chunks=each, expert=expert, recompute=recompute)

    def _even(self, places: int) -> bool:
        """Whether layers over ``places`` differ so little that no stage has a tenth more than its share."""
        most = -(-len(self._model.layers) // places)
        return len(self._model.layers) >= places and most * places <= 1.1 * len(self._model.layers)

    def _fits(self, split: ModelSplit) -> bool:
        fits = self._least(split) <= self._device.memory
        self._pruned["more memory than there is"] += not fits
        return fits

    def _least(self, split: ModelSplit) -> float:
        """Bytes of device memory without which no schedule runs ``split``."""
        found = self._needed.get(split)
        if found is None:
            found = self._needed[split] = least_memory(self._model, split).needed()
        return found

    def _times(self, split: ModelSplit) -> LayerTimes:
        """Seconds of each kind of layer."""
        key = (split.tensor, split.context, split.method, split.micro_batch, split.expert, split.recompute)
        kinds = self._model.kinds.layers
        if key not in self._layers:
            self._layers[key] = {kind: working_time(kind, split, self._device) for kind in kinds}
        times = self._layers[key]
        if not split.lends:
            return times
        if (*key, split.data) not in self._layers:
            lent = {kind: lent_time(kind, times[kind], split, self._device) for kind in kinds}
            self._layers[*key, split.data] = lent
        return self._layers[*key, split.data]

    def _seconds(self, split: ModelSplit) -> float:
        """Seconds of a microbatch in all layers."""
        times = self._times(split)
        return self._model.kinds.sum(lambda layer: times[layer].forward + times[layer].backward)

    def _estimate(self, split: ModelSplit) -> float:
        counts = (
            ()
            if not len(self._model.layers) % (split.pipeline * split.chunks)
            else spread(len(self._model.layers), split.pipeline * split.chunks)
        )
        spec = LayoutSpec(split.pipeline, split.chunks, len(self._model.layers), tuple(counts))
        return estimate(self._model, split, self._device, looped_layout(spec), self._times(split))

    def _nothing_fits(self, splits: Sequence[ModelSplit]) -> InputError:
        size = f"{self._model.parameters / 1e9:.1f}B parameters"
        what = f"no split of {size} over {self._ranks} x {self._device.name} fits"
        if not splits:
            return InputError(
                what,
                why=f"sizes do not divide, or a step has more than {LARGEST} actions",
                fix="change the global batch, its ramp-up or the number of GPUs",
            )
        needed = min(map(self._least, splits)) / 2**30
        return InputError(
            what,
            why=f"the smallest needs {needed:.1f} GiB of {self._device.memory / 2**30:.0f} on a GPU",
            fix="take more GPUs, larger ones, or a shorter sequence",
        )


def shares(model: ModelCosts, split: ModelSplit, device: Device, step: StepTime) -> dict[str, float]:
    """Parts of ``step`` that are no computation, each as a fraction of it."""
    layer = mean_layer(model, split, device)
    free = device.links.model_copy(update={"bandwidth": 1e30, "latency": 0.0})
    free = free.model_copy(update={"machine_bandwidth": 1e30, "machine_latency": 0.0, "sums": (), "messages": ()})
    silent = mean_layer(model, split, device.model_copy(update={"links": free}))
    kept = mean_layer(model, replace(split, recompute="none"), device)
    whole = layer.forward + layer.backward
    busy = step.pipeline * (1 - step.waiting) / step.seconds
    return {
        "waiting": step.pipeline * step.waiting / step.seconds,
        "layer traffic": busy * (whole - silent.forward - silent.backward) / whole,
        "recomputation": busy * (layer.backward - kept.backward) / whole,
        "gradient reduction": step.reduction / step.seconds,
        "update": step.update / step.seconds,
    }


def _divisors(number: int) -> list[int]:
    small = [each for each in range(1, isqrt(number) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})
