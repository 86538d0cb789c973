"""Units, which come and go together: the buckets that one segment reads first, whole only while segments need them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from megatron_run_engine.runtime.gates import in_backward

if TYPE_CHECKING:
    from torch.nn import Parameter

    from megatron_run.contracts import Chunk, ParamInfo
    from megatron_run_engine.optim.loans import LentShard, LentValues
    from megatron_run_engine.runtime.comm import Pending

    Infos = dict[Parameter, ParamInfo]


@dataclass(frozen=True, eq=False)
class Unit:
    """The buckets that one segment reads first, of those that are lent: they come and go together.

    ``place`` is that of the segment among the units of its ``chunk``.
    """

    chunk: int
    place: int
    shards: tuple[LentShard, ...]
    frozen: tuple[LentValues, ...] = ()

    def initialise(self, seed: int) -> None:
        """Give values to parameters that were built without memory, and take that of the buckets."""
        for shard in self.shards:
            shard.initialise(seed)
        for values in self.frozen:
            values.initialise(seed)

    @property
    def lent(self) -> tuple[LentValues, ...]:
        """The parameters, those that are trained and those that are not."""
        return (*(shard.lent for shard in self.shards), *self.frozen)

    @property
    def tied(self) -> bool:
        """Whether another segment reads one of the parameters too."""
        return any(shard.bucket.chunk is None for shard in self.shards)

    @property
    def values_lent(self) -> int:
        """Bytes of the whole parameters."""
        return sum(each.values.nbytes for each in self.lent)

    @property
    def gradients_lent(self) -> int:
        """Bytes of the whole gradients."""
        return sum(shard.bucket.grad.nbytes for shard in self.shards)


class LentParameters:
    """Parameters of ``units``: gathered by ``gather`` before they are read, the next ones beside that.

    At most ``held`` units are whole; 0: as many as are read until the next update. One that is read counts also beyond
    that. Those that were read last stay, so that a backward begins with what the forward has ended with.
    """

    def __init__(self, units: Sequence[Unit], gather: Callable[[LentValues], Pending], held: int) -> None:
        self._units = {(unit.chunk, unit.place): unit for unit in units}
        self._unit_of = {p: unit for unit in units for each in unit.lent for p in each.bucket.parameters}
        self._gather, self._most = gather, held or len(units)
        self._ahead = max(held - 1, 1)
        #: Whole, or on the way, in the order of their last use.
        self._whole: dict[Unit, list[Pending]] = {}
        self._read = set[Unit]()

    def take(self, parameters: Iterable[Parameter], *, ahead: bool = True) -> None:
        """Wait until the units of ``parameters`` are whole, and if ``ahead`` begin to gather the next ones."""
        for unit in self._found(parameters):
            if unit not in self._whole:
                self._make_room()
                self._start(unit)
            self._whole[unit] = arriving = self._whole.pop(unit)  # now the last one used
            self._read.add(unit)
            if ahead:
                self._prefetch(unit)
            while arriving:
                arriving.pop().wait()

    def give_back(self, parameters: Iterable[Parameter]) -> None:
        """The units of ``parameters`` may make room for others."""
        self._read.difference_update(self._found(parameters))

    def keep(self, parameters: Iterable[Parameter]) -> None:
        """Take over what was written to ``parameters``, which are taken."""
        for unit in self._found(parameters):
            for each in unit.frozen:
                each.keep()

    def settle(self) -> None:
        """Wait for all that is on the way."""
        for arriving in self._whole.values():
            while arriving:
                arriving.pop().wait()

    def forget(self) -> None:
        """Take all back: what was gathered is no longer the parameters' value."""
        self._read.clear()
        for unit in [*self._whole]:
            self._drop(unit)

    def _found(self, parameters: Iterable[Parameter]) -> list[Unit]:
        return list(dict.fromkeys(unit for p in parameters if (unit := self._unit_of.get(p)) is not None))

    def _prefetch(self, unit: Unit) -> None:
        """Begin to gather the units that follow in this pass, as far as there is room."""
        step = -1 if in_backward() else 1
        for distance in range(1, 1 + self._ahead):
            following = self._units.get((unit.chunk, unit.place + step * distance))
            if following is None:
                return
            if following in self._whole:
                self._whole[following] = self._whole.pop(following)
            elif self._make_room():
                self._start(following)

    def _make_room(self) -> bool:
        """Whether one more unit may become whole; the one that was used the longest ago goes for it."""
        idle = (unit for unit in [*self._whole] if unit not in self._read)
        while len(self._whole) >= self._most:
            first = next(idle, None)
            if first is None:
                return False
            self._drop(first)
        return True

    def _start(self, unit: Unit) -> None:
        for each in unit.lent:
            each.lend()
        self._whole[unit] = [self._gather(each) for each in unit.lent]

    def _drop(self, unit: Unit) -> None:
        for arriving in self._whole.pop(unit):
            arriving.wait()  # it would be written to after its memory is gone
        for each in unit.lent:
            each.take_back()


class LentGradients:
    """Gradients of ``units``: whole while a backward adds to them, then reduced by ``reduce`` beside the next ones.

    With ``each_microbatch`` they leave as soon as those of another unit begin; otherwise when the step's are complete,
    and rounding is then that of gradients which are never cut.
    """

    def __init__(self, units: Sequence[Unit], reduce: Callable[[LentShard], Pending], *, each_microbatch: bool) -> None:
        self._units, self._reduce, self._early = tuple(units), reduce, each_microbatch
        self._unit_of = {p: unit for unit in units for shard in unit.shards for p in shard.bucket.parameters}
        self._open = dict[Unit, None]()
        self._due = set[Unit]()
        self._leaving: deque[tuple[Unit, list[Pending]]] = deque()

    def begin_step(self) -> None:
        """With one reduction a step all units are due, those too to which this rank will add nothing."""
        self._due = set() if self._early else set(self._units)

    def begin(self, parameters: Iterable[Parameter]) -> None:
        """Make the gradients of ``parameters`` ready to be added to."""
        units = dict.fromkeys(unit for p in parameters if (unit := self._unit_of.get(p)) is not None)
        if units.keys() <= self._open.keys():
            return
        if self._early:
            self._send([unit for unit in self._open if unit not in units])
        for unit in [unit for unit in units if unit not in self._open]:
            self._lend(unit)

    def finish(self, chunk: int | None = None) -> None:
        """Reduce what is left: of ``chunk``, or everything, which has then arrived.

        A tied parameter, to which other chunks may still add, leaves at last.
        """
        ending = [u for u in reversed(self._units) if chunk is None or (u.chunk == chunk and not u.tied)]
        for unit in [unit for unit in ending if unit in self._due and unit not in self._open]:
            self._lend(unit)
        self._send([unit for unit in ending if unit in self._open])
        if chunk is None:
            while self._leaving:
                self._end()

    def _lend(self, unit: Unit) -> None:
        self._arrive(until=unit)
        for shard in unit.shards:
            shard.lend_gradients()
        self._open[unit] = None

    def _send(self, units: Iterable[Unit]) -> None:
        for unit in units:
            del self._open[unit]
            self._due.discard(unit)
            while self._early and self._leaving:
                self._end()
            self._leaving.append((unit, [self._reduce(shard) for shard in unit.shards]))

    def _arrive(self, until: Unit) -> None:
        """Wait for ``until``, and those before it, if it is still leaving."""
        while any(unit is until for unit, _ in self._leaving):
            self._end()

    def _end(self) -> None:
        unit, pending = self._leaving.popleft()
        for each, shard in zip(pending, unit.shards, strict=True):
            each.wait()
            shard.add_reduced()


def most_lent(units: Sequence[Unit], held: int, *, each_microbatch: bool) -> int:
    """Bytes of whole parameters and gradients that ``units`` hold at once, at most.

    Of parameters those of ``held`` neighbours (0: all); of gradients those of two, or with one reduction a step all.
    """
    values, gradients = ([getattr(unit, name) for unit in units] for name in ("values_lent", "gradients_lent"))
    of_gradients = max(map(sum, pairwise([0, *gradients])), default=0) if each_microbatch else sum(gradients)
    windows = [sum(values[first : first + held]) for first in range(len(values))] if held else [sum(values)]
    return max(windows, default=0) + of_gradients


def recomputed_together(chunk: Chunk) -> int:
    """Segments of a layer of ``chunk`` that are recomputed one after the other, at most: all are whole meanwhile."""
    runs = groupby(chunk.segments(), key=lambda segment: (segment.layer, segment.recompute))
    return max((sum(1 for _ in run) for (_, again), run in runs if again), default=0)


def units_of(
    segments: Sequence[Iterable[Iterable[Parameter]]],
    infos: Sequence[Infos],
    lends: Callable[[Parameter, ParamInfo], bool],
) -> list[tuple[int, int, Infos]]:
    """The parameters that ``lends`` names, by chunk and segment: each belongs to the first segment that reads it.

    ``segments[c]`` are the parameters of the segments of chunk c. Within a unit they are in the order of ``infos``.
    """
    found: list[tuple[int, int, Infos]] = []
    seen: set[Parameter] = set()
    for chunk, (read, described) in enumerate(zip(segments, infos, strict=True)):
        place = 0
        for parameters in read:
            own = {p for p in parameters if p in described and p not in seen and lends(p, described[p])}
            seen |= own
            if own:
                found.append((chunk, place, {p: info for p, info in described.items() if p in own}))
                place += 1
    return found
