"""Regions from segments: neighbours in the scope go together, and give out what others read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain, groupby, pairwise
from typing import TYPE_CHECKING

from megatron_run.contracts import Region
from megatron_run.errors import InputError, advice, did_you_mean
from megatron_run_engine.capture.rules import blamed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from megatron_run.contracts import Segment
    from megatron_run_engine.runtime.context import BuildContext


def choose_regions(chunks: Sequence[Sequence[Segment]], scope: Collection[str]) -> tuple[Region, ...]:
    """The regions of each chunk's segments (in forward order) whose names are in ``scope``.

    A region ends with its layer, and before a second segment that draws random numbers. Raises
    :class:`InputError` for one that must run eagerly, with its reason.
    """
    found: list[Region] = []
    for chunk, segments in enumerate(chunks):
        for _, group in groupby(segments, key=lambda segment: segment.layer):
            layer = tuple(group)
            found += (_region(chunk, run, layer[stop:]) for run, stop in _runs(layer, scope))
    return tuple(found)


def check_scope(scope: Sequence[str], chunks: Sequence[Sequence[Segment]], context: BuildContext) -> None:
    """Raise :class:`InputError` for a name of ``scope`` that no stage's ``chunks`` publish. Collective over the world.

    Stages publish different segments: only the first has an embedding. While a run is planned there is nobody to ask.
    """
    if context.groups.world is None and context.topology.sizes.world > 1:
        return
    here = [segment.name for segments in chunks for segment in segments]
    published = list(dict.fromkeys(chain.from_iterable(context.groups.gather_names(here, context.device))))
    missing = [name for name in scope if name not in published]
    if missing:
        raise InputError(
            f"graph-capture.scope names {missing[0]!r}, which no layer publishes",
            fix=advice(did_you_mean(missing[0], published), f"the model publishes {', '.join(published)}"),
        )


def _runs(layer: Sequence[Segment], scope: Collection[str]) -> Iterator[tuple[tuple[Segment, ...], int]]:
    """The longest runs of neighbours that become a region each, and where each stops in ``layer``."""
    run: list[Segment] = []
    for index, segment in enumerate(layer):
        captured = segment.name in scope
        if captured and segment.why_eager:
            raise InputError(
                f"segment {segment.name} of layer {segment.layer} cannot be captured",
                why=segment.why_eager,
                fix=f"leave {segment.name} out of graph-capture.scope",
            )
        if run and not (captured and not (segment.draws and any(before.draws for before in run))):
            yield tuple(run), index
            run = []
        if captured:
            run.append(segment)
    if run:
        yield tuple(run), len(layer)


def _region(chunk: int, segments: tuple[Segment, ...], rest: Sequence[Segment]) -> Region:
    """``rest`` are the layer's segments after these; without any, all results are the layer's."""
    made, inputs = set[str](), dict[str, None]()
    for segment in segments:
        inputs.update((name, None) for name in segment.inputs if name not in made)
        made.update(segment.outputs)
    inside = {name for segment in segments[1:] for name in segment.inputs}
    wanted = {name for segment in rest for name in segment.inputs} | ({*segments[-1].outputs} if not rest else set())
    outputs = dict.fromkeys(name for segment in segments for name in segment.outputs)
    return Region(
        chunk, segments, tuple(inputs), tuple(name for name in outputs if name in wanted or name not in inside)
    )


def by_chunk(regions: Sequence[Region], chunks: int) -> tuple[tuple[Region, ...], ...]:
    """The regions of each chunk, in forward order."""
    of_chunk: dict[int, list[Region]] = defaultdict(list)
    for region in regions:
        of_chunk[region.chunk].append(region)
    return tuple(tuple(of_chunk[chunk]) for chunk in range(chunks))


def chained(regions: Sequence[Region], chunks: Sequence[Sequence[Segment]]) -> Mapping[Region, Region]:
    """For each region that can read its inputs where the one before left them: that one.

    Nothing runs between the two, and the one gives out all that the other reads.
    """
    found: dict[Region, Region] = {}
    places = {id(segment): place for segments in chunks for place, segment in enumerate(segments)}
    for before, after in pairwise(regions):
        next_to = places[id(after.segments[0])] == places[id(before.segments[-1])] + 1
        if before.chunk == after.chunk and next_to and {*after.inputs} <= {*before.outputs}:
            found[after] = before
    return found


def call(region: Region, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Run ``region``'s segments on its inputs. What breaks a rule of capture is blamed on its segment."""
    environment = dict(zip(region.inputs, tensors, strict=True))
    for segment in region.segments:
        with blamed(f"segment {segment.name} of layer {segment.layer}", "forward"):
            result = segment.fn(*(environment[name] for name in segment.inputs))
        outputs = result if isinstance(result, tuple) else (result,)
        environment.update(zip(segment.outputs, outputs, strict=True))
    return tuple(environment[name] for name in region.outputs)
