"""Regions of segments: neighbours in the scope are captured together, and output what later segments read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain, groupby, pairwise
from typing import TYPE_CHECKING

from megatron_run.config.values import typed
from megatron_run.contracts import Region
from megatron_run.errors import InputError
from megatron_run.errors.wording import advice, did_you_mean
from megatron_run_engine.capture.rules import blamed
from megatron_run_engine.runtime.recompute import names_read, run_recomputed

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run.contracts import Segment
    from megatron_run.contracts.schema import SegmentNames
    from megatron_run_engine.runtime.context import BuildContext


def choose_regions(
    chunks: Sequence[Sequence[Segment]], scope: Collection[str], *, leave_eager: bool = False
) -> tuple[Region, ...]:
    """Return the regions of the segments in ``scope``. ``chunks`` holds each chunk's segments in forward order.

    A region ends with its layer, and before a second segment that draws random numbers: the random streams are
    positioned once per region. Raises :class:`InputError` for a segment in ``scope`` that must run eagerly; with
    ``leave_eager``, for a scope that no user has named, such segments and those that are offloaded are left out.
    """
    found: list[Region] = []
    for chunk, segments in enumerate(chunks):
        for _, group in groupby(segments, key=lambda segment: segment.layer):
            layer = tuple(group)
            found += (_region(chunk, run, layer[stop:]) for run, stop in _runs(layer, scope, leave_eager=leave_eager))
    return tuple(found)


#: The name in a scope that stands for the whole step.
STEP = "step"


def every_segment(chunks: Sequence[Sequence[Segment]]) -> tuple[Region, ...]:
    """Return the regions of all segments, for a graph of whole steps. Raises :class:`InputError` if one cannot be."""
    _check_segments(chunks)
    return choose_regions(chunks, {segment.name for chunk in chunks for segment in chunk})


def check_step(pipeline: int, offload: SegmentNames, chunks: Sequence[Sequence[Segment]] = ()) -> None:
    """Raise :class:`InputError` if one graph cannot hold a step of ``chunks``, on one of ``pipeline`` stages."""
    if pipeline > 1:
        raise InputError(
            f"graph-capture.scope=step with parallel.pipeline={pipeline}",
            why="between the actions of a stage the host waits for messages",
            fix="name segments, such as attn,mlp",
        )
    if offload != "none":
        raise InputError(
            f"graph-capture.scope=step with train.offload={typed(offload)}",
            why="what a graph saves stays in its memory",
            fix="leave one of them out",
        )
    _check_segments(chunks)


def _check_segments(chunks: Sequence[Sequence[Segment]]) -> None:
    for segment in chain.from_iterable(chunks):
        if segment.why_eager or segment.draws:
            raise InputError(
                f"graph-capture.scope=step cannot capture segment {segment.name} of layer {segment.layer}",
                why=segment.why_eager or "the host positions the random streams before each segment that draws",
                fix="set every dropout to 0, or name segments" if segment.draws else "name segments, without this one",
            )


def check_scope(scope: Sequence[str], chunks: Sequence[Sequence[Segment]], context: BuildContext) -> None:
    """Raise :class:`InputError` for a name of ``scope`` that no stage's ``chunks`` publish. Collective over the world.

    Stages publish different segments: only the first has an embedding.
    """
    if context.groups.world is None and context.topology.sizes.world > 1:
        return  # while a run is planned there are no process groups
    here = [segment.name for segments in chunks for segment in segments]
    published = list(dict.fromkeys(chain.from_iterable(context.groups.gather_names(here, context.device))))
    missing = [name for name in scope if name not in published]
    if missing:
        raise InputError(
            f"graph-capture.scope names {missing[0]!r}, which no layer publishes",
            fix=advice(
                did_you_mean(missing[0], [*published, STEP]),
                f"the model publishes {', '.join(published)}; {STEP} stands for the whole step",
            ),
        )


def _runs(
    layer: Sequence[Segment], scope: Collection[str], *, leave_eager: bool
) -> Iterator[tuple[tuple[Segment, ...], int]]:
    """Yield the longest runs of neighbours that form a region, each with the index in ``layer`` at which it stops."""
    run: list[Segment] = []
    for index, segment in enumerate(layer):
        captured = segment.name in scope and not (leave_eager and (segment.why_eager or segment.offload))
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
    """Make the region of ``segments``. ``rest`` are the layer's later segments; without any, all outputs are kept."""
    inside = {name for segment in segments[1:] for name in segment.inputs}
    wanted = {name for segment in rest for name in segment.inputs} | ({*segments[-1].outputs} if not rest else set())
    outputs = dict.fromkeys(name for segment in segments for name in segment.outputs)
    return Region(
        chunk, segments, names_read(segments), tuple(name for name in outputs if name in wanted or name not in inside)
    )


def by_chunk(regions: Sequence[Region], chunks: int) -> tuple[tuple[Region, ...], ...]:
    """Return the regions of each chunk in forward order."""
    of_chunk: dict[int, list[Region]] = defaultdict(list)
    for region in regions:
        of_chunk[region.chunk].append(region)
    return tuple(tuple(of_chunk[chunk]) for chunk in range(chunks))


def chained(regions: Sequence[Region], chunks: Sequence[Sequence[Segment]]) -> Mapping[Region, Region]:
    """Map each region that can read its inputs in place from the outputs of the one before it, to that one.

    This holds if nothing runs between the two, and the first outputs everything that the second reads.
    """
    found: dict[Region, Region] = {}
    places = {id(segment): place for segments in chunks for place, segment in enumerate(segments)}
    for before, after in pairwise(regions):
        next_to = places[id(after.segments[0])] == places[id(before.segments[-1])] + 1
        if before.chunk == after.chunk and next_to and {*after.inputs} <= {*before.outputs}:
            found[after] = before
    return found


def call(
    region: Region,
    tensors: Sequence[Tensor],
    position: Callable[[Segment], None] = lambda _: None,
    *,
    recompute: bool = True,
) -> tuple[Tensor, ...]:
    """Run the segments of ``region`` on its inputs. A broken rule of capture is reported with the segment's name.

    Segments that are recomputed run again in the backward: a graph of that backward computes them itself, and the
    memory of the forward's graph is free for others in between. ``position`` precedes each run of a segment; in a
    recording nothing may, and the random streams are positioned before a replay of either graph. Without ``recompute``
    every segment runs once: what replays again in the backward needs no more.
    """

    def run(segment: Segment, environment: dict[str, Tensor]) -> None:
        position(segment)
        with blamed(f"segment {segment.name} of layer {segment.layer}", "forward"):
            result = segment.fn(*(environment[name] for name in segment.inputs))
        outputs = result if isinstance(result, tuple) else (result,)
        environment.update(zip(segment.outputs, outputs, strict=True))

    environment = dict(zip(region.inputs, tensors, strict=True))
    for again, group in groupby(region.segments, key=lambda segment: recompute and segment.recompute):
        if again:
            run_recomputed(tuple(group), environment, run)
            continue
        for segment in group:
            run(segment, environment)
    return tuple(environment[name] for name in region.outputs)
