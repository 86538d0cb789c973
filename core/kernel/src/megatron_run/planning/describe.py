"""A resolved run in words, for people and observers, and as data, for ``plan.json``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from megatron_run.contracts.topology import Topology
from megatron_run.errors.wording import plural
from megatron_run.pipeline.simulate import timeline
from megatron_run.planning.choosing import dumped
from megatron_run.planning.rank_grid import experts_of, held_experts
from megatron_run.planning.run import sections

if TYPE_CHECKING:
    from megatron_run.pipeline.plan import Plan
    from megatron_run.planning.run import ResolvedRun
    from megatron_run.registry.loaded_plugin import Plugin

#: The most runs of consecutive numbers that a row of equal ranks lists.
_RUNS = 4


def describe(run: ResolvedRun) -> str:
    """Per kind the chosen plugin, its source, why it was chosen and its options; then topology, plans and notices."""
    parts = [
        _plugins(run),
        _topology(run),
        [*_plans(run), *_activations(run)],
        [f"note: {notice}" for notice in run.notices],
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def run_record(run: ResolvedRun) -> dict[str, Any]:
    """The text of :func:`describe` as data, with the whole configuration."""
    return {
        "plugins": {kind: [_plugin_record(each) for each in stack] for kind, stack in run.plugins.items()},
        "topology": {
            "world": run.sizes.world,
            "tensor": run.sizes.tensor,
            "context": run.sizes.context,
            "pipeline": run.sizes.pipeline,
            "chunks": run.config.parallel.chunks,
            "data": run.sizes.data,
            "expert": run.sizes.expert,
            "ranks": [*_rank_records(run)],
        },
        "plans": [_plan_record(run.plans[count]) for count in sorted(run.plans)],
        "config": sections(run),
        "notices": list(run.notices),
    }


def _plugins(run: ResolvedRun) -> list[str]:
    rows = [
        (kind, plugin.name, plugin.source, plugin.origin) for kind, stack in run.plugins.items() for plugin in stack
    ]
    options = [_options(plugin) for stack in run.plugins.values() for plugin in stack]
    lines = ["plugins"]
    for row, text in zip(_aligned(rows), options, strict=True):
        lines += [f"  {row}", f"      {text}"] if text else [f"  {row}"]
    return lines


def _options(plugin: Plugin) -> str:
    """The options that differ from the defaults; ``config show`` has the rest."""
    values = dumped(plugin, defaults=False).items()
    return " ".join(f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in values)


def _topology(run: ResolvedRun) -> list[str]:
    sizes, chunks = run.sizes, run.config.parallel.chunks
    context = f" x context {sizes.context}" if sizes.context > 1 else ""
    head = f"world {sizes.world} = tensor {sizes.tensor}{context} x pipeline {sizes.pipeline} x data {sizes.data}"
    pieces = f"; {chunks} chunks per stage" if chunks > 1 else ""
    pieces += f"; data ranks split a layer's experts {sizes.expert} ways" if sizes.expert > 1 else ""
    rows = [tuple(_held_alike(run, stage, expert)) for stage in range(sizes.pipeline) for expert in range(sizes.expert)]
    return [f"topology: {head}{pieces}", *(f"  {row}" for row in _aligned(rows))]


def _held_alike(run: ResolvedRun, stage: int, expert: int) -> Iterator[str]:
    """The cells for the ranks of ``stage`` that hold the same experts: numbers along axes of more than one rank."""
    sizes = run.sizes
    first = Topology(sizes, 0).rank_at(data=expert, stage=stage)
    count, copy = sizes.data // sizes.expert, sizes.tensor * sizes.context
    ranks = "ranks" if copy * count > 1 else "rank"
    yield f"{ranks} {_numbers(first, copy, copy * sizes.expert, count)}"
    yield f"stage {stage}"
    if sizes.tensor > 1:
        yield f"tensor {_numbers(0, sizes.tensor, sizes.tensor, 1)}"
    if sizes.context > 1:
        yield f"context {_numbers(0, sizes.context, sizes.context, 1)}"
    if sizes.data > 1:
        yield f"data {_numbers(expert, 1, sizes.expert, count)}"
    if sizes.expert > 1:
        held, experts = _experts(run, expert), experts_of(run.one("model"))
        yield f"experts {spans(held)} of {experts}" if held else f"expert group {expert}"
    yield f"layers {' | '.join(map(spans, _layers(run, stage)))}"


def _numbers(first: int, length: int, stride: int, count: int) -> str:
    """``count`` runs of ``length`` numbers, ``stride`` apart: ``"3"``, ``"0-7"``, ``"0-1, 4-5, ..., 60-61"``."""
    if length == stride:
        length, count = length * count, 1
    starts = range(first, first + stride * count, stride)
    runs = [spans(range(start, start + length)) for start in (starts if count <= _RUNS else (*starts[:2], starts[-1]))]
    return ", ".join(runs if count <= _RUNS else (*runs[:2], "...", runs[-1]))


def _rank_records(run: ResolvedRun) -> Iterator[dict[str, Any]]:
    """The place of each rank, and what it holds."""
    layers = [[list(each) for each in _layers(run, stage)] for stage in range(run.sizes.pipeline)]
    texts = [" | ".join(map(spans, each)) for each in layers]
    experts = [[*_experts(run, expert)] for expert in range(run.sizes.expert)]
    for place in (Topology(run.sizes, rank) for rank in range(run.sizes.world)):
        yield {
            "rank": place.rank,
            "stage": place.stage,
            "tensor": place.tensor_rank,
            "context": place.context_rank,
            "data": place.data_rank,
            "expert": place.expert_rank,
            "experts": experts[place.expert_rank],
            "layers": layers[place.stage],
            "layers_text": texts[place.stage],
        }


def _layers(run: ResolvedRun, stage: int) -> list[Sequence[int]]:
    """The layers of each chunk of ``stage``."""
    places = sorted((each for each in run.layout if each.stage == stage), key=lambda each: each.chunk)
    return [each.layers for each in places]


def _experts(run: ResolvedRun, expert: int) -> range:
    return held_experts(experts_of(run.one("model")) or 0, run.sizes.expert, expert)


def spans(numbers: Sequence[int]) -> str:
    """Ascending ``numbers`` as ranges: ``"0-3"``, ``"0, 2-4"``, ``"none"``."""
    known = set(numbers)
    starts = [number for number in numbers if number - 1 not in known]
    ends = [number for number in numbers if number + 1 not in known]
    pairs = zip(starts, ends, strict=True)
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in pairs) or "none"


def _plans(run: ResolvedRun) -> list[str]:
    lines = []
    for count in sorted(run.plans):
        record = _plan_record(run.plans[count])
        peaks = f"{', '.join(map(str, record['peak_in_flight']))} by stage"
        if record["peak_held"] != record["peak_in_flight"]:
            peaks += f" ({', '.join(map(str, record['peak_held']))} with those that W still reads)"
        step = f"step of {plural(count, 'microbatch')}"
        lines.append(f"{step}: in flight at most {peaks}, bubble {record['bubble']:.1%}")
    return lines


def _activations(run: ResolvedRun) -> Iterator[str]:
    """The tensors that are not kept on the device between a forward and its backward."""
    train = run.config.train
    ways = ((train.recompute, "recomputed in the backward"), (train.offload, "moved to host memory until the backward"))
    notes = [
        f"{', '.join(names) if isinstance(names, tuple) else 'all of every layer'} {what}"
        for names, what in ways
        if names != "none"
    ]
    if notes:
        yield f"saved activations: {'; '.join(notes)}"


def _plan_record(plan: Plan) -> dict[str, Any]:
    return {
        "microbatches": plan.microbatches,
        "peak_in_flight": list(plan.peak_in_flight),
        "peak_held": list(plan.peak_held),
        "bubble": timeline(plan).bubble_fraction,
    }


def _plugin_record(plugin: Plugin) -> dict[str, Any]:
    return {
        "name": plugin.name,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "location": plugin.location,
        "origin": plugin.origin,
        "options": dumped(plugin),
        "code": plugin.digest,
    }


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
