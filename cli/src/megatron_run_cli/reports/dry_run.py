"""The report of ``--dry-run``: the resolved run, parameters and memory of each rank, and a picture of one step.

With a device it says whether the run fits there. Without the engine it has no sizes: configuration, ranks, plan and
batches are planned, and with a device the planner's own count of memory is shown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_run.errors import RunError
from megatron_run.errors.install_hint import ENGINE, how_to_install
from megatron_run.pipeline.simulate import timeline, timeline_text
from megatron_run.planning.describe import describe, run_record, spans
from megatron_run_cli.reports.memory_report import (
    ON_HOST,
    StageMemory,
    memory_record,
    memory_text,
    stage_memories,
    write_memory_svg,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from megatron_run.contracts import Split
    from megatron_run.pipeline.plan import Plan
    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.capture import Pass
    from megatron_run_engine.capture.order import Slots
    from megatron_run_engine.estimate.model_size import Mixture, ModelSize, RankSize
    from megatron_run_planner.devices import Device


def dry_run_text(run: ResolvedRun, device: Device | None = None, svg: Path | None = None) -> str:
    """Return the report as text, and draw the memory to ``svg``.

    Raises what building the model and opening the data raise.
    """
    plan = run.plans[max(run.plans)]
    step = [f"one step\n{timeline_text(timeline(plan))}"] if run.sizes.pipeline > 1 else []
    if uncounted := _uncounted(run, device):
        memory = _memory(run, None, None, device, svg)
        return "\n\n".join([describe(run), *([memory_text(memory)] if device else []), *step, uncounted])
    size = _checked_size(run)
    counted = _step_memory(run, device)
    parts = [describe(run), _parameters_text(size, counted)]
    parts.append(memory_text(_memory(run, size, counted, device, svg), _planned_kind(run)))
    if size.mixture is not None:
        parts.append(_mixture_text(size.mixture, size.parameters, run.sizes.expert))
    parts += step
    if any(captured.regions for captured in size.captures):
        parts.append(_captures_text(size, plan))
    notices = [] if device else _machine_notices(run, size)
    return "\n\n".join([*parts, *(f"note: {notice}" for notice in notices)])


def _memory(
    run: ResolvedRun,
    size: ModelSize | None,
    counted: list[dict[str, int]] | None,
    device: Device | None,
    svg: Path | None,
) -> StageMemory:
    memory = stage_memories(run, size, counted, device)
    if svg:
        write_memory_svg(memory, svg)
    return memory


def _uncounted(run: ResolvedRun, device: Device | None) -> str:
    """Why parameters, memory and graphs are not counted in the layers themselves; empty where they are.

    What a start would refuse beside the model is refused, with the engine.
    """
    if run.unloaded:
        return f"parameters, memory and graphs are known with the engine only; type: {how_to_install(ENGINE)}"
    from megatron_run_engine.estimate.model_size import why_not_built
    from megatron_run_engine.estimate.room_for_copies import check_folder

    if why := why_not_built(run):
        _check_start(run)
        if device is None:
            check_folder(run)
        return f"parameters, memory and graphs are not counted: {why}; for the planner's count add --device NAME"
    return ""


def open_data(run: ResolvedRun) -> None:
    """Find the initial weights and read a sample of each data split: what is missing or odd is told before a start."""
    from megatron_run_engine.evaluation.tasks import check_files
    from megatron_run_engine.training.checked_plugins import open_split
    from megatron_run_engine.training.state.init_from import check_source

    check_source(run)
    check_files(run.config.eval.tasks)
    plugin, train = run.one("data"), run.config.train
    source = plugin.create()
    splits: tuple[Split, ...] = ("train", "validation")
    for split in splits:
        dataset = open_split(plugin, source, split, train.sequence_length, train.seed)
        if len(dataset):
            dataset[0]


def dry_run_json(run: ResolvedRun, device: Device | None = None, svg: Path | None = None) -> dict[str, Any]:
    """Return the report as JSON data."""
    record = run_record(run)
    if uncounted := _uncounted(run, device):
        planned = memory_record(_memory(run, None, None, device, svg))
        return {**record, "memory": planned, "notices": [*record["notices"], uncounted]}
    size = _checked_size(run)
    counted = _step_memory(run, device)
    return {
        **record,
        "notices": [*record["notices"], *([] if device else _machine_notices(run, size))],
        "parameters": size.parameters,
        "parameters_by_stage": [stage.parameters for stage in size.stages],
        "padding_by_stage": [stage.padding for stage in size.stages],
        "memory_by_stage": [dict(stage.memory) for stage in size.stages],
        "host_memory_by_stage": [_on_host(stage) for stage in size.stages],
        "activations_by_stage": counted and [roles["activations"] for roles in counted],
        "memory": memory_record(_memory(run, size, counted, device, svg)),
        "padded_vocab": size.padded_vocab,
        "mixture": _mixture_record(size),
        "graphs_by_stage": [
            {"regions": captured.regions, "graphs": captured.graphs, "slots": captured.slots}
            for captured in size.captures
        ],
    }


def _check_start(run: ResolvedRun) -> None:
    """Raise what a start would refuse beside the model: run folder, data, and where the weights are."""
    from megatron_run_engine.run_folder import check_run_folder

    check_run_folder(run)
    open_data(run)


def _checked_size(run: ResolvedRun) -> ModelSize:
    """The sizes of the model, once all is checked that a start would refuse: run folder, data, and initial weights."""
    from megatron_run_engine.estimate.model_size import model_size
    from megatron_run_engine.training.state.init_from import check_shapes

    _check_start(run)
    size = model_size(run)
    check_shapes(run, size.shapes)
    return size


def _machine_notices(run: ResolvedRun, size: ModelSize) -> list[str]:
    """Why this machine could not train the run, which ranks a start leaves out, and if steps in memory lie on a disk.

    Raises what a start would say of their folder, and of the record of ranks to leave out.
    """
    from megatron_run_engine.estimate.machine_memory import lacks_memory
    from megatron_run_engine.estimate.room_for_copies import check_folder, check_room
    from megatron_run_engine.host.process import check_local_devices
    from megatron_run_engine.launch.restarts import Restarts

    places = Restarts(0, run.sizes.world + run.spares, run.config.run.elastic != "off")
    notices = [*filter(None, (check_folder(run), places.leave_out(run.config.run.folder)))]
    try:
        devices = check_local_devices(run)
        check_room(run, size, range(run.sizes.world))
    except RunError as error:
        return [*notices, f"this machine cannot train it: {error}"]
    lacks = lacks_memory(run, size) if devices == ("cpu",) else ""
    return [*notices, f"this machine cannot train it: {lacks}"] if lacks else notices


def _mixture_record(size: ModelSize) -> dict[str, Any] | None:
    mixture = size.mixture
    if mixture is None:
        return None
    return {
        "layers": list(mixture.layers),
        "experts": mixture.experts,
        "top_k": mixture.top_k,
        "parameters_per_token": size.parameters - mixture.inactive,
    }


def _mixture_text(mixture: Mixture, parameters: int, ways: int) -> str:
    """Describe which layers have experts, how many a rank holds, and the active parameters of a token."""
    held = "all of them" if ways == 1 else f"{mixture.experts // ways} of each layer, as the topology lists them"
    layers = spans(mixture.layers)
    return "\n".join(
        (
            f"experts: {mixture.experts} in each of layers {layers}, of which a token is routed to {mixture.top_k}",
            f"  a rank holds of its layers' experts: {held}",
            f"  parameters active for a token: {parameters - mixture.inactive:,} of {parameters:,}",
        )
    )


def _captures_text(size: ModelSize, plan: Plan) -> str:
    """Describe the graphs of each stage, and draw the slots of stage 0: no later stage needs more."""
    from megatron_run_engine.capture import passes, shared_slots

    lines = [f"graphs of {', '.join(size.captured)}"]
    lines += [f"  stage {stage}: {captured}" for stage, captured in enumerate(size.captures)]
    if not any(captured.slots for captured in size.captures):
        return "\n".join(lines)
    order = passes(plan.lists[0], plan.chunks)
    return "\n".join((*lines, "the microbatches in flight on stage 0", slots_text(order, shared_slots(order))))


def _step_memory(run: ResolvedRun, device: Device | None = None) -> list[dict[str, int]] | None:
    """As the engine counts it for ``device``, or else for the one that the run is planned for."""
    from megatron_run_engine.estimate.step_memory import step_memory

    return step_memory(run, gpu=device.cores is None if device else None)


def _planned_kind(run: ResolvedRun) -> str:
    """The kind of device that the run is planned for."""
    from megatron_run_engine.runtime.context import planned_device

    return "GPU" if planned_device(run.config.run, run.sizes.world).type == "cuda" else "CPU"


def _parameters_text(size: ModelSize, counted: list[dict[str, int]] | None) -> str:
    held = [
        f"{rank.parameters:,} on stage {stage}" + (f" (and {rank.padding:,} of padding)" if rank.padding else "")
        for stage, rank in enumerate(size.stages)
    ]
    memory = [f"  stage {stage}: {_memory_text(rank)}" for stage, rank in enumerate(size.stages)]
    if counted is not None:
        held_by_stage = [roles["activations"] for roles in counted]
        memory = [f"{line}; activations {_amount(held)}" for line, held in zip(memory, held_by_stage, strict=True)]
    shared = any("lent" in rank.memory for rank in size.stages)
    what = "of a stage, which its ranks share" if shared else "of a rank"
    on_host = [_on_host(rank) for rank in size.stages]
    return "\n".join(
        (
            f"parameters of the model: {size.parameters:,}",
            f"parameters {what}: {', '.join(held)}",
            f"vocabulary: {size.vocab:,}, padded to {size.padded_vocab:,}",
            f"memory of a rank, without {'messages' if counted else 'activations and messages'}:",
            *memory,
            *([f"of it in host memory: {', '.join(map(_amount, on_host))}"] if any(on_host) else []),
        )
    )


def _on_host(size: RankSize) -> int:
    """Bytes of a rank that lie in host memory, whatever the device."""
    return sum(held for role, held in size.memory.items() if role.startswith(ON_HOST))


def _amount(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"


def _memory_text(size: RankSize) -> str:
    """Format the bytes of a rank: in total, per parameter and by role."""
    total = sum(size.memory.values())
    unit, name = (2**30, "GiB") if total >= 2**30 else (2**20, "MiB")
    roles = " + ".join(f"{role.replace('_', ' ')} {held / unit:,.1f}" for role, held in size.memory.items() if held)
    each = f", {total / size.parameters:.2f} bytes a parameter" if size.parameters else ""
    return f"{total / unit:,.1f} {name}{each} ({roles})"


def slots_text(order: Sequence[Pass], slots: Slots, width: int = 100) -> str:
    """One line a slot; a column is a pass and shows the microbatch that holds the slot: a digit from its forward on.

    The forward's column shows the digit, the backward's a small letter, and ``-`` lies between. Steps longer than
    ``width`` passes are cut.
    """
    steps = [each for each in order if each.kind != "end"]
    lines = [["."] * len(steps) for _ in range(slots.count)]
    started: dict[tuple[int, int], int] = {}
    for column, (kind, chunk, copy) in enumerate(steps):
        line = lines[slots.of[chunk, copy]]
        if kind == "F":
            started[chunk, copy] = column
            line[column] = str(copy % 10)
            continue
        first = started.pop((chunk, copy))
        line[first + 1 : column] = ["-"] * (column - first - 1)
        line[column] = chr(ord("a") + copy % 26)
    margin = len(str(max(0, slots.count - 1)))
    cut = "~" if len(steps) > width else "|"
    shown = [f"slot {slot:{margin}} |{''.join(line[:width])}{cut}" for slot, line in enumerate(lines)]
    return "\n".join([*shown, "digit: forward of that microbatch (its last digit); a, b, ...: its backward"])
