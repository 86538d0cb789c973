"""A resolved run in words, for people and observers, and as data, for ``plan.json``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_run.contracts.topology import Topology
from megatron_run.errors import plural
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
    """What :func:`describe` says as data, with the whole configuration."""
    return {
        "plugins": {kind: [_plugin_record(each) for each in many] for kind, many in run.plugins.items()},
        "topology": {
            "world": run.sizes.world,
            "tensor": run.sizes.tensor,
            "pipeline": run.sizes.pipeline,
            "chunks": run.config.parallel.chunks,
            "data": run.sizes.data,
            "expert": run.sizes.expert,
            "ranks": [_rank_record(run, rank) for rank in range(run.sizes.world)],
        },
        "plans": [_plan_record(run.plans[count]) for count in sorted(run.plans)],
        "config": sections(run),
        "notices": list(run.notices),
    }


def _plugins(run: ResolvedRun) -> list[str]:
    rows = [(kind, plugin.name, plugin.source, plugin.origin) for kind, many in run.plugins.items() for plugin in many]
    options = [_options(plugin) for many in run.plugins.values() for plugin in many]
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
    head = f"world {sizes.world} = tensor {sizes.tensor} x pipeline {sizes.pipeline} x data {sizes.data}"
    pieces = f"; {chunks} chunks per stage" if chunks > 1 else ""
    pieces += f"; data ranks split a layer's experts {sizes.expert} ways" if sizes.expert > 1 else ""
    alike: dict[object, list[dict[str, Any]]] = {}
    for record in (_rank_record(run, rank) for rank in range(sizes.world)):
        alike.setdefault((record["stage"], record["expert"]), []).append(record)
    rows = [
        (_numbered("rank", records), f"stage {first['stage']}", *_axes(run, records), f"layers {first['layers_text']}")
        for records in alike.values()
        for first in records[:1]
    ]
    return [f"topology: {head}{pieces}", *(f"  {row}" for row in _aligned(rows))]


def _numbered(axis: str, records: Sequence[Mapping[str, Any]]) -> str:
    """The numbers of ``records`` along ``axis``: ``"data 3"``, ``"ranks 0-7"``, ``"ranks 0-1, 4-5, ..., 60-61"``."""
    name = f"{axis}s" if axis == "rank" and len(records) > 1 else axis
    runs = spans(sorted({record[axis] for record in records})).split(", ")
    return f"{name} {', '.join(runs if len(runs) <= _RUNS else [*runs[:2], '...', runs[-1]])}"


def _axes(run: ResolvedRun, records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The coordinates along axes of more than one rank, and the experts that the ranks hold."""
    for axis in ("tensor", "data"):
        if getattr(run.sizes, axis) > 1:
            yield _numbered(axis, records)
    if run.sizes.expert > 1:
        held, experts = records[0]["experts"], experts_of(run.one("model"))
        yield f"experts {spans(held)} of {experts}" if held else f"expert group {records[0]['expert']}"


def _rank_record(run: ResolvedRun, rank: int) -> dict[str, Any]:
    place = Topology(run.sizes, rank)
    mine = sorted((each for each in run.layout if each.stage == place.stage), key=lambda each: each.chunk)
    return {
        "rank": rank,
        "stage": place.stage,
        "tensor": place.tensor_rank,
        "data": place.data_rank,
        "expert": place.expert_rank,
        "experts": [*held_experts(experts_of(run.one("model")) or 0, run.sizes.expert, place.expert_rank)],
        "layers": [list(each.layers) for each in mine],
        "layers_text": " | ".join(spans(each.layers) for each in mine),
    }


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
    """What is not kept on the device between a forward and its backward."""
    train = run.config.train
    ways = ((train.recompute, "recomputed in the backward"), (train.offload, "moved to host memory until the backward"))
    told = [
        f"{', '.join(names) if isinstance(names, tuple) else 'all of every layer'} {what}"
        for names, what in ways
        if names != "none"
    ]
    if told:
        yield f"saved activations: {'; '.join(told)}"


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
