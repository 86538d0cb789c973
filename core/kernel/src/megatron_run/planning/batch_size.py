"""How many samples each step takes: the global batch with its ramp-up, and where a step lies in the sample stream.

Everything is a pure function of the configuration, so that a resumed run needs the number of its last step and no
counter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from megatron_run.errors import Findings, InputError
from megatron_run.errors.wording import nearest_divisors, nearest_multiples

if TYPE_CHECKING:
    from megatron_run.contracts.schema import TrainSection


@dataclass(frozen=True)
class BatchPeriod:
    """A run of steps of one global batch ``size``; ``step`` steps and ``samples`` samples lie before it."""

    size: int
    step: int
    samples: int


#: The most sizes of the batch on its way up: each of them is planned, and a ramp of more is a typing mistake.
MAX_INCREMENTS = 100_000


def _ramp_faults(full: int, start: int, increment: int, unit: int = 1) -> Iterator[InputError]:
    """Why no ramp leads from ``start`` to ``full``; the advice keeps to multiples of ``unit``."""
    gap = full - start
    if gap < 0:
        yield InputError(
            f"train.ramp_up.start={start} is above train.global_batch_size={full}", fix=f"start at {full} or below"
        )
    elif gap % increment:
        yield InputError(
            f"train.ramp_up.increment={increment} never reaches the full batch",
            why=f"{full} - {start} = {gap}, which is not a multiple of {increment}",
            fix=f"set train.ramp_up.increment to {nearest_divisors(gap, increment, unit)}",
        )
    elif gap // increment > MAX_INCREMENTS:
        yield InputError(
            f"train.ramp_up has {gap // increment} sizes of the batch",
            why=f"each is planned, and at most {MAX_INCREMENTS} are",
            fix="raise train.ramp_up.increment",
        )


@dataclass(frozen=True)
class BatchRamp:
    """The global batch as a function of the samples consumed so far.

    It starts at ``start`` and grows by ``increment`` after every ``samples / n`` samples, where ``n = (full - start) /
    increment``, so that it is ``full`` from ``samples`` on (``--rampup-batch-size`` of Megatron-LM). The quotient is
    taken in whole numbers, so no rounding moves a boundary. Raises :class:`InputError` when ``increment`` does not lead
    from ``start`` to ``full``, or in more than ``MAX_INCREMENTS`` steps.
    """

    full: int
    start: int
    increment: int
    samples: int

    @classmethod
    def from_config(cls, train: TrainSection) -> BatchRamp:
        """The ramp of ``train.ramp_up``, or one that is full from the first sample."""
        full, ramp = train.global_batch_size, train.ramp_up
        return cls(full, ramp.start, ramp.increment, ramp.samples) if ramp else cls(full, full, full, 0)

    def __post_init__(self) -> None:
        for fault in _ramp_faults(self.full, self.start, self.increment):
            raise fault

    @property
    def increments(self) -> int:
        """How often the batch grows, ``n``."""
        return (self.full - self.start) // self.increment

    def at(self, consumed: int) -> int:
        """The global batch of the step that starts once ``consumed`` samples have been consumed."""
        if consumed >= self.samples:
            return self.full
        return self.start + consumed * self.increments // self.samples * self.increment

    @cached_property
    def stretches(self) -> tuple[BatchPeriod, ...]:
        """The steps of equal batch, in order; the last, of the full batch, never ends."""
        found: list[BatchPeriod] = []
        step = consumed = 0
        while (size := self.at(consumed)) < self.full:
            found.append(BatchPeriod(size, step, consumed))
            grown = (size - self.start) // self.increment + 1
            boundary = -(-grown * self.samples // self.increments)
            steps = -(-(boundary - consumed) // size)
            step, consumed = step + steps, consumed + steps * size
        return (*found, BatchPeriod(self.full, step, consumed))

    def consumed_at(self, step: int) -> int:
        """Samples consumed once ``step`` steps are done; 0 at step 0."""
        last = max((part for part in self.stretches if part.step <= step), key=lambda part: part.step)
        return last.samples + (step - last.step) * last.size

    def steps_within(self, samples: int) -> int:
        """How many whole steps fit into ``samples`` samples."""
        last = max((part for part in self.stretches if part.samples <= samples), key=lambda part: part.samples)
        return last.step + (samples - last.samples) // last.size


def total_steps(train: TrainSection) -> int:
    """The number of steps of the run: ``train.steps``, or as many as fit into ``train.samples``.

    Raises :class:`InputError` when not one step fits.
    """
    if train.steps is not None:
        return train.steps
    assert train.samples is not None, "the configuration holds steps or samples"
    steps = BatchRamp.from_config(train).steps_within(train.samples)
    if steps:
        return steps
    raise InputError(
        f"train.samples={train.samples} is less than the first global batch",
        why=f"a step takes {BatchRamp.from_config(train).at(0)} samples",
        fix="raise train.samples, or say train.steps",
    )


def total_samples(train: TrainSection) -> int:
    """The samples that the run consumes: ``train.samples`` as given, or those of ``train.steps`` steps."""
    if train.samples is not None:
        return train.samples
    return BatchRamp.from_config(train).consumed_at(total_steps(train))


def run_length(train: TrainSection, step: int, samples: int) -> tuple[int, int]:
    """The last step and all samples of a run whose first ``step`` steps consumed ``samples``, whatever their batches.

    Without a change of the batch they are :func:`total_steps` and :func:`total_samples`.
    """
    ramp = BatchRamp.from_config(train)
    last, total = total_steps(train), total_samples(train)
    if samples == ramp.consumed_at(step):
        return last, total
    if train.samples is None:
        while step < last and (size := ramp.at(samples)) < ramp.full:
            step, samples = step + 1, samples + size
        return last, samples + max(0, last - step) * ramp.full
    while samples + (size := ramp.at(samples)) <= total and size < ramp.full:
        step, samples = step + 1, samples + size
    return step + max(0, total - samples) // ramp.full, total


class BatchSizes:
    """The batch of every step as this many data-parallel ranks share it.

    Raises :class:`Problems` when a global batch, at any point of a ramp-up, does not divide into micro batches over
    the data-parallel ranks, or the ramp leads nowhere. ``follows_from`` is the key and value that demand so many of
    these, where no number of ranks was asked for.
    """

    def __init__(self, train: TrainSection, data_parallel: int, follows_from: str = "") -> None:
        self._train, self._data_parallel, self._follows_from = train, data_parallel, follows_from
        self._unit = train.micro_batch_size * data_parallel
        findings = Findings()
        for fault in self._faults():
            findings.add(fault)
        findings.settle()
        self._ramp = BatchRamp.from_config(train)

    def _faults(self) -> Iterator[InputError]:
        full, ramp, unit = self._train.global_batch_size, self._train.ramp_up, self._unit
        if full % unit:
            yield self._not_divisible("train.global_batch_size", full, nearest_multiples(full, unit))
        if ramp is None or ramp.start == full:
            return
        if ramp.start % unit:
            yield self._not_divisible("train.ramp_up.start", ramp.start, nearest_multiples(ramp.start, unit))
        even = ramp.increment % unit == 0
        if not even:
            reaching = "" if (full - ramp.start) % unit else nearest_divisors(full - ramp.start, ramp.increment, unit)
            advice = reaching or nearest_multiples(ramp.increment, unit)
            yield self._not_divisible("train.ramp_up.increment", ramp.increment, advice)
        if even or ramp.start > full:
            yield from _ramp_faults(full, ramp.start, ramp.increment, unit)

    def _not_divisible(self, key: str, value: int, advice: str) -> InputError:
        source = self._follows_from
        return InputError(
            f"{key}={value} is not a multiple of micro batch x data parallel",
            why=f"{self._train.micro_batch_size} x {self._data_parallel} = {self._unit}"
            + (f", where data parallel is {self._data_parallel} for {source}" if source else ""),
            fix=f"set {key} to {advice}" + (f", or lower {source.partition('=')[0]}" if source else ""),
        )

    def at(self, consumed: int) -> int:
        """The global batch of the step that starts once ``consumed`` samples have been consumed."""
        return self._ramp.at(consumed)

    def microbatches(self, global_batch: int) -> int:
        """The microbatches M that each rank runs in a step of ``global_batch`` samples."""
        return global_batch // self._unit

    def all_microbatches(self) -> frozenset[int]:
        """Every M that occurs in the run; a ramp-up skips those it jumps over."""
        steps = self.steps()
        return frozenset(self.microbatches(part.size) for part in self._ramp.stretches if part.step < steps)

    def steps(self) -> int:
        """The number of steps of the run."""
        return total_steps(self._train)

    def consumed_at(self, step: int) -> int:
        """Samples consumed once ``step`` steps are done: step ``s`` reads from ``consumed_at(s - 1)`` on."""
        return self._ramp.consumed_at(step)
