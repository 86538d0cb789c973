"""Uneven splits of the layers over the pipeline, in the two ways of Megatron-LM.

- ``parallel.first_stage_layers`` and ``parallel.last_stage_layers`` fix the layers of stage 0 and of stage P-1, all
  chunks together; the other layers are split evenly over the other stages, those of a stage evenly over its chunks.
- ``parallel.embedding_as_layer`` and ``parallel.loss_as_layer`` count what the first and the last place do besides as
  one layer each in an even split, so that these places hold one layer fewer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megatron_run.contracts.schema import ParallelSection
from megatron_run.errors import InputError
from megatron_run.errors.wording import nearest, plural

_COUNTS = "parallel.layers"
_FIRST, _LAST = "parallel.first_stage_layers", "parallel.last_stage_layers"
_EMBEDDING, _LOSS = "parallel.embedding_as_layer", "parallel.loss_as_layer"

#: How each key is unset again on the command line.
_UNSET = {_COUNTS: "", _FIRST: "null", _LAST: "null", _EMBEDDING: "false", _LOSS: "false"}


def is_uneven(parallel: ParallelSection) -> bool:
    """Whether :func:`layer_counts` must derive the counts."""
    return bool(_fixed_ends(parallel) or _counted_ends(parallel))


def layer_counts(layers: int, parallel: ParallelSection, stages: Sequence[int]) -> tuple[int, ...]:
    """The layers of each place in model order; ``stages`` says, in the same order, on which stage each place lies.

    Raises :class:`InputError` for keys that exclude each other and for splits that leave a remainder, with the nearest
    numbers that leave none.
    """
    ways = {_COUNTS: parallel.layers} if parallel.layers else {}, _fixed_ends(parallel), _counted_ends(parallel)
    asked = [list(way) for way in ways if way]
    if len(asked) > 1:
        raise _several_ways(asked)
    return _with_fixed_ends(layers, parallel, stages) if ways[1] else _with_counted_ends(layers, parallel, len(stages))


def natural_layers(parallel: ParallelSection) -> int:
    """The number of layers where ``model.num_layers`` is not set: one per place, unless the user's counts say more."""
    places, extra = parallel.pipeline * parallel.chunks, len(_counted_ends(parallel))
    if extra:
        return -(-(1 + extra) // places) * places - extra
    ends = _fixed_ends(parallel)
    others = max(parallel.pipeline - len(ends), 0) * parallel.chunks  # one stage is the first and the last
    return sum(parallel.layers) or sum(ends.values()) + others or places


def _fixed_ends(parallel: ParallelSection) -> dict[str, int]:
    given = {_FIRST: parallel.first_stage_layers, _LAST: parallel.last_stage_layers}
    return {key: count for key, count in given.items() if count is not None}


def _counted_ends(parallel: ParallelSection) -> dict[str, bool]:
    given = {_EMBEDDING: parallel.embedding_as_layer, _LOSS: parallel.loss_as_layer}
    return {key: counted for key, counted in given.items() if counted}


def _several_ways(asked: Sequence[Sequence[str]]) -> InputError:
    keep = [
        f"to keep {' with '.join(keys)}: {_unset(key for other in asked if other is not keys for key in other)}"
        for keys in asked
    ]
    return InputError(
        f"{' and '.join(keys[0] for keys in asked)} exclude each other",
        why="each says in its own way how the layers are split",
        fix="; ".join(keep),
    )


def _unset(keys: Iterable[str]) -> str:
    return " ".join(f"--set {key}={_UNSET[key]}" for key in keys)


class _Pipeline(NamedTuple):
    """A split to try: its layers, those of the first and the last stage where they are fixed."""

    stages: int
    chunks: int
    layers: int
    first: int | None
    last: int | None

    @property
    def fixed(self) -> list[int]:
        return [count for count in (self.first, self.last) if count is not None]

    @property
    def left(self) -> int:
        """The layers for the other stages."""
        return self.layers - sum(self.fixed)

    @property
    def others(self) -> int:
        """The places on the other stages."""
        return (self.stages - len(self.fixed)) * self.chunks

    @property
    def fits(self) -> bool:
        """Whether each place gets a whole number of layers, and every layer a place."""
        whole = all(count % self.chunks == 0 for count in self.fixed)
        return whole and self.left >= 0 and (self.left % self.others if self.others else self.left) == 0


def _with_fixed_ends(layers: int, parallel: ParallelSection, stages: Sequence[int]) -> tuple[int, ...]:
    ends = _fixed_ends(parallel)
    if parallel.pipeline == 1:
        raise InputError(
            f"{' and '.join(ends)} {'need' if len(ends) > 1 else 'needs'} at least two stages",
            why="with parallel.pipeline=1 the first stage is the last one too",
            fix=f"leave it to the even split: {_unset(ends)}",
        )
    wanted = _Pipeline(
        parallel.pipeline, parallel.chunks, layers, parallel.first_stage_layers, parallel.last_stage_layers
    )
    if not wanted.fits:
        raise _no_fit(wanted, ends)
    rest = wanted.left // wanted.others if wanted.others else 0
    given = {0: wanted.first, wanted.stages - 1: wanted.last}
    of_stage = {stage: count // wanted.chunks for stage, count in given.items() if count is not None}
    return tuple(of_stage.get(stage, rest) for stage in stages)


def _no_fit(wanted: _Pipeline, ends: dict[str, int]) -> InputError:
    what, why = _arithmetic(wanted, ends)
    most = sum(ends.values()) + wanted.layers + wanted.stages * wanted.chunks
    tried = (
        (_FIRST, wanted.first, range(wanted.layers + 1), lambda count: wanted._replace(first=count).fits),
        (_LAST, wanted.last, range(wanted.layers + 1), lambda count: wanted._replace(last=count).fits),
        ("model.num_layers", wanted.layers, range(1, most + 1), lambda count: wanted._replace(layers=count).fits),
    )
    near = [(key, nearest(count, filter(fits, among))) for key, count, among, fits in tried if count is not None]
    fixes = [f"set {key} to {numbers}" for key, numbers in near if numbers]
    return InputError(what, why=why, fix=_or_counts(fixes, wanted.stages * wanted.chunks, ends))


def _arithmetic(wanted: _Pipeline, ends: dict[str, int]) -> tuple[str, str]:
    """The parts *what* and *why* of the error."""
    asked = " and ".join(f"{key}={count}" for key, count in ends.items())
    leave, are = ("leave", "are") if len(ends) > 1 else ("leaves", "is")
    for key, count in ends.items():
        if count % wanted.chunks:
            return f"{key}={count} does not divide over the chunks of a stage", f"parallel.chunks is {wanted.chunks}"
    if wanted.left < 0:
        return f"{asked} {are} more than the model has", f"{sum(ends.values())} of {wanted.layers} layers"
    what = f"{asked} {leave} {wanted.left} of {wanted.layers} layers"
    if not wanted.others:
        return what, "there is no stage between the first and the last"
    return what, f"they do not divide over the places of the other stages, {wanted.others}"


def _with_counted_ends(layers: int, parallel: ParallelSection, places: int) -> tuple[int, ...]:
    counted, stages, chunks = _counted_ends(parallel), parallel.pipeline, parallel.chunks
    total = layers + len(counted)
    if total % places:
        numbers = nearest(layers, (each for each in range(1, total + places) if (each + len(counted)) % places == 0))
        shape = f"{plural(stages, 'stage')} x {plural(chunks, 'chunk')}"
        raise InputError(
            f"{total} layers do not divide over {shape} = {places} places",
            why=f"{layers} of the model, and one for {' and one for '.join(counted)}",
            fix=_or_counts([f"set model.num_layers to {numbers}"], places, counted),
        )
    counts = [total // places] * places
    counts[0] -= parallel.embedding_as_layer  # a place that is not the only one holds at least one layer to give up
    counts[-1] -= parallel.loss_as_layer
    return tuple(counts)


def _or_counts(fixes: Sequence[str], places: int, keys: Iterable[str]) -> str:
    """``fixes``, or counts in the place of ``keys``, which exclude them."""
    return ", or ".join([*fixes, f"give {_COUNTS} as {places} counts instead, with {_unset(keys)}"])
