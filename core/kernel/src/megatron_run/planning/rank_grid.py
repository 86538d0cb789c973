"""Derives the size of every parallel axis from the configuration and the number of ranks, and splits the experts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd

from megatron_run.config.origin import DEFAULT, Key, Origin, dotted
from megatron_run.contracts import mixture_of
from megatron_run.contracts.schema import ParallelSection, TrainSection
from megatron_run.contracts.topology import Sizes
from megatron_run.errors import InputError, RunError
from megatron_run.errors.wording import nearest, nearest_multiples
from megatron_run.registry.loaded_plugin import Plugin

#: The most ranks of a run: their groups are lists, and a world of more is a typing mistake.
MAX_RANKS = 1_000_000


def infer_sizes(parallel: ParallelSection, nproc: int | None) -> Sizes:
    """The size of every axis; the data axis is the rest of a world of ``nproc`` ranks, or what experts need.

    Raises :class:`InputError` with the nearest worlds that divide, and for more than ``MAX_RANKS``.
    """
    data, unit = parallel.data, copy_ranks(parallel)
    if nproc is not None:
        if nproc < 1:
            raise InputError(f"--nproc {nproc} starts no rank", fix="start at least 1")
        product = " x ".join(f"parallel.{axis} {getattr(parallel, axis)}" for axis in shown_axes(parallel))
        if data is not None and nproc != unit * data:
            raise InputError(
                f"a world of {nproc} ranks was asked for",
                why=f"{product} x parallel.data {data} = {unit * data}",
                fix=f"start {unit * data} ranks (--nproc {unit * data}), or leave parallel.data open",
            )
        if nproc % unit:
            nearest = nearest_multiples(nproc, unit)
            raise InputError(
                f"a world of {nproc} ranks does not divide",
                why=f"{product} = {unit} ranks hold one copy of the model",
                fix=f"start {nearest} ranks (--nproc {nearest.partition(' ')[0]})",
            )
    world = nproc or unit * (data or parallel.expert)
    if world > MAX_RANKS:
        why = (
            f"{', '.join(f'parallel.{axis}={getattr(parallel, axis)}' for axis in shown_axes(parallel))}, "
            f"parallel.data={data} and --nproc ask for {world}"
        )
        raise InputError(f"a run has at most {MAX_RANKS} ranks", why=why, fix="ask for fewer")
    return Sizes(
        tensor=parallel.tensor,
        context=parallel.context,
        pipeline=parallel.pipeline,
        data=world // unit,
        expert=parallel.expert,
    )


def copy_ranks(parallel: ParallelSection) -> int:
    """The ranks that hold one copy of the model, each for its pieces of a sample."""
    return parallel.tensor * parallel.context * parallel.pipeline


def shown_axes(parallel: ParallelSection) -> tuple[str, ...]:
    """The axes of :func:`copy_ranks` that a message names."""
    return ("tensor", *(("context",) if parallel.context > 1 else ()), "pipeline")


def source_of_data(parallel: ParallelSection, nproc: int | None) -> str:
    """The key and value from which :func:`infer_sizes` takes the data axis, where no number of ranks is given."""
    return f"parallel.expert={parallel.expert}" if nproc is parallel.data is None and parallel.expert > 1 else ""


def idle_keys(parallel: ParallelSection) -> list[str]:
    """A notice for every key that was asked for and changes nothing in this topology."""
    notices = []
    if parallel.sequence and parallel.tensor == 1:
        notices.append("parallel.sequence=true splits nothing over one rank; set parallel.tensor to 2 or more")
    if parallel.scatter_messages and (reason := _nothing_to_scatter(parallel)):
        notices.append(f"parallel.scatter_messages=true changes nothing: {reason}")
    return notices


def _nothing_to_scatter(parallel: ParallelSection) -> str:
    if parallel.pipeline == 1:
        return "one pipeline stage sends no messages"
    if parallel.tensor == 1:
        return "one tensor-parallel rank has nobody to share a message with"
    return "with parallel.sequence=true each rank's messages are parts already" if parallel.sequence else ""


def attribute(error: RunError, origins: Mapping[Key, Origin]) -> None:
    """Set the origin of ``error``, unless it has one, to those of the keys that it names."""
    if not error.origin:
        text = f"{error.what} {error.why} {error.fix}"
        named = (origin for key, origin in origins.items() if origin != DEFAULT and _names(text, dotted(key)))
        error.origin = " and ".join(dict.fromkeys(map(str, named)))


def _names(text: str, key: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.])", text) is not None


def experts_of(model: Plugin | None) -> int | None:
    """The experts of a layer by the options of ``model``; None where these are invalid or have no experts."""
    experts = mixture_of(model.options) if model else None
    return experts.count if experts else None


def held_experts(experts: int, ways: int, position: int) -> range:
    """The experts of a layer that the rank at ``position`` of ``ways`` along the expert axis holds."""
    return range(position * experts // ways, (position + 1) * experts // ways)


@dataclass(frozen=True)
class ExpertSplit:
    """``experts`` of a layer over the ranks of ``parallel``; ``nproc`` ranks are started, None: as many as needed."""

    experts: int
    parallel: ParallelSection
    train: TrainSection | None
    nproc: int | None

    def check(self) -> None:
        """Raise :class:`InputError` where ``parallel.expert`` does not split the experts or the data-parallel ranks.

        The advice fits both, and also the global batch where the number of ranks follows from the experts.
        """
        ways, experts = self.parallel.expert, self.experts
        if ways == 1:
            return
        if not experts:
            raise InputError(
                f"parallel.expert={ways} splits experts over ranks",
                why="the model has none: model.experts.count=0",
                fix=f"set model.experts.count to a multiple of {ways}, or parallel.expert=1",
            )
        if faults := [*self._faults()]:
            raise InputError(", and ".join(faults), why=self._why(), fix=self._fix())

    @property
    def _unit(self) -> int:
        return copy_ranks(self.parallel)

    @property
    def _data(self) -> int | None:
        """The data-parallel ranks, where they are given; None: as many as experts need."""
        if self.parallel.data is not None or self.nproc is None or self.nproc % self._unit:
            return self.parallel.data
        return self.nproc // self._unit

    def _faults(self) -> Iterator[str]:
        ways, experts = self.parallel.expert, self.experts
        if experts % ways:
            quotient = f"{experts} / {ways} = {experts / ways:g}"
            yield f"model.experts.count={experts} do not split over parallel.expert={ways} ranks: {quotient}"
        if self._data is not None and self._data % ways:
            yield f"parallel.expert={ways} does not divide the data-parallel size {self._data}"

    def _why(self) -> str:
        if self._data is None or gcd(self.experts, self._data) > 1:
            return ""
        return f"nothing above 1 divides both {self.experts} experts and {self._data} ranks"

    def _fix(self) -> str:
        """The nearest values of each key with which the split is even."""
        ways, data = self.parallel.expert, self._data
        serves = [each for each in range(1, self.experts + 1) if not self.experts % each and self._fits_ranks(each)]
        advice = [f"set parallel.expert to {nearest(ways, serves)}"] if serves else []
        if self._fits_ranks(ways):
            key = "or " if advice else "set "
            advice.append(f"{key}model.experts.count to {nearest_multiples(self.experts, ways)}")
        elif data is not None and not self.experts % ways:
            sizes = [each for each in range(ways, 2 * data + ways, ways) if self._fits_batch(each)]
            advice += [f"or {self._ranks(data, sizes)}"] if sizes else []
        return ", ".join(advice) or "set parallel.expert=1, and a train.global_batch_size that divides"

    def _fits_ranks(self, ways: int) -> bool:
        return self._fits_batch(ways) if self._data is None else self._data % ways == 0

    def _fits_batch(self, data: int) -> bool:
        """Whether ``data`` data-parallel ranks divide the global batch; an invalid train section has its own error."""
        return self.train is None or self.train.global_batch_size % (self.train.micro_batch_size * data) == 0

    def _ranks(self, data: int, sizes: Sequence[int]) -> str:
        """The setting for one of the data-parallel ``sizes`` in place of ``data``."""
        if self.nproc is None:
            return f"parallel.data to {nearest(data, sizes)}"
        worlds = nearest(data * self._unit, [size * self._unit for size in sizes])
        alone = "" if self.parallel.data is None else ", and leave parallel.data open"
        return f"start {worlds} ranks (--nproc {worlds.partition(' ')[0]}){alone}"
