"""The output of ``plan``: the best splits, two compared, a schedule that was found, what a month yields."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron_run.contracts.costs import ModelCosts
    from megatron_run_planner.commands.methods import Method
    from megatron_run_planner.devices import Device
    from megatron_run_planner.goodput import Conditions, Yield
    from megatron_run_planner.schedules.for_task import Answer
    from megatron_run_planner.search import Candidate, Choice
    from megatron_run_planner.task import Task
    from megatron_run_planner.workload import ModelSplit

_GIB, _MIB, _DAY = 2**30, 2**20, 86400
#: In which the length of a run is told, and their seconds.
_UNITS = {"days": _DAY, "hours": 3600, "minutes": 60, "seconds": 1}


def choice_text(
    task: Task, found: Choice, device: Device, written: Path | None = None, install: Sequence[str] = ()
) -> str:
    """The task, the best candidates with what limits each, and what was left out.

    The best is ``written`` to a file; ``install`` is what to type first for its plugins.
    """
    best = found.best[0]
    lines = [
        *_heading(task, "fit", best, device),
        "",
        *_table(task, found.best, device),
        "",
        f"best: {_settings(task, best)}",
        *_methods(task, best, device),
        *_memory(best, device),
        *_cost(task, best),
        *_other_optimizer(task, best),
        _next(best, device, written, install),
        f"left out of {found.tried} splits that divide, once for each schedule that refuses one:",
        *(f"  {count} {reason}" for reason, count in found.pruned.most_common() if count),
    ]
    return "\n".join(lines)


def _other_optimizer(task: Task, best: Candidate) -> list[str]:
    """A note where another optimizer takes the place of the configured one that lends."""
    configured = task.split.optimizer
    if configured != "zero3" or best.split.optimizer == configured:
        return []
    chosen = best.split.optimizer
    why = "which fits and sends less" if best.split.replicas > 1 else "since no two ranks hold the same weights"
    return [f"note: optimizer={chosen} takes the place of the configured {configured}, {why}"]


def _next(best: Candidate, device: Device, written: Path | None, install: Sequence[str]) -> str:
    """The command that trains so."""
    ranks, own = best.split.ranks, device.links.machine
    start = f"--nproc {ranks}" if ranks <= own else f"on {-(-ranks // own)} machines (docs/jobs)"
    config = quote(str(written or "best.yaml"))
    steps = [*(f"{command}, then" for command in install), *([] if written else ["add --write best.yaml, then"])]
    return " ".join(["next:", *steps, f"megatron-run {config} --dry-run, and megatron-run {config} {start}"])


def written_line(task: Task, file: Path) -> str:
    """That the split is in ``file``, and what that file lacks."""
    generated = task.sections.get("data", {}).get("use") == "mock"
    lacks = "; its data are generated (data=mock): name yours in it (docs/data.md)" if generated else ""
    return f"\nwritten: {file}{lacks}"


def _heading(task: Task, verb: str, each: Candidate, device: Device) -> list[str]:
    """The subject of the numbers below."""
    batch = f"{each.split.global_batch} x {task.model.sequence} tokens"
    count = task.model.parameters
    size = f"{count / 1e9:.1f}B" if count >= 5e7 else f"{count:,.0f}"
    asked = f"{size} parameters {verb} {each.split.ranks} x {device.name}, batch {batch}"
    return [asked, *_reading(task)]


def _reading(task: Task) -> list[str]:
    """The ground of the numbers, where the model is not read as it is."""
    return [f"read as {task.reading}"] if task.reading else []


def _table(task: Task, candidates: Sequence[Candidate], device: Device) -> list[str]:
    pieces = [_pieces(each.split) for each in candidates]  # a column where samples are split
    width = max(map(len, pieces)) and max(map(len, (*pieces, "  context")))
    keys = "pipeline  chunks  data  expert  micro  recompute  optimizer"
    rows = [f"    step  tokens/s    MFU      memory  tensor{'context' if width else '':>{width}}  {keys}  schedule"]
    for each, context in zip(candidates, pieces, strict=True):
        split, seconds = each.split, each.step.seconds
        speed = split.global_batch * task.model.sequence / seconds
        rows.append(
            f"{seconds:7.3f}s  {speed:8,.0f}  {each.step.mfu(task.model, split, device):5.1%}  "
            f"{each.tensors / _GIB:6.1f} GiB  {split.tensor:6}{context:>{width}}  "
            f"{split.pipeline:8}  {split.chunks:6}  {split.data:4}  {split.expert:6}  "
            f"{split.micro_batch:5}  {split.recompute:9}  {split.optimizer:9}  "
            f"{each.schedule}; {each.limit} {each.shares[each.limit]:.0%}"
        )
    return rows


def _pieces(split: ModelSplit) -> str:
    """The ranks that split a sample and the method by which its tokens meet; empty where none is split."""
    return f"  {split.context} {split.method}" if split.context > 1 else ""


def _methods(task: Task, each: Candidate, device: Device) -> list[str]:
    """The costs of each method where samples are split, the chosen one first: why it is chosen."""
    from megatron_run_planner.commands.methods import compare

    found = compare(task.model, each.split, device)
    words = (f"by {method.name} {_method(method, device)}" for method in found)
    return [f"a layer and microbatch {'; '.join(words)}"] if found else []


def _method(method: Method, device: Device) -> str:
    """Time and traffic, and memory if that is more than there is; or why the model cannot be split so."""
    if method.refused:
        return f"cannot be: {method.refused}"
    needed = f", and {method.needed / _GIB:.1f} GiB at least" if method.needed > device.memory else ""
    return f"{method.seconds * 1e3:,.2f} ms, {method.sent / _MIB:,.0f} MiB sent{needed}"


def _settings(task: Task, each: Candidate) -> str:
    from megatron_run_planner.task import to_type

    return " ".join(to_type(task, each))


def _memory(each: Candidate, device: Device) -> list[str]:
    fullest = max(each.memory, key=lambda rank: rank.total)
    large = [f"{role} {size / _GIB:.1f}" for role, size in asdict(fullest).items() if size >= _GIB / 20]
    of = f" ({' + '.join(large)})" if large else ""
    return [f"memory of the fullest rank: {_held(each, device)}{of}"]


def _held(each: Candidate, device: Device) -> str:
    """Bytes of tensors, what must be free beside them, and of how many."""
    reserve = each.needed - each.tensors
    return (
        f"{each.tensors / _GIB:.1f} GiB of tensors and {reserve / _GIB:.1f} in reserve, of {device.memory / _GIB:.0f}"
    )


def _cost(task: Task, each: Candidate) -> list[str]:
    if task.steps is None:
        return []
    seconds = task.steps * each.step.seconds
    unit = next((unit for unit, length in _UNITS.items() if seconds >= length), "seconds")
    whole = f"the whole run of {task.steps:,} steps: {task.tokens or 0:.3g} tokens"
    hours = seconds / _UNITS["hours"] * each.split.ranks
    return [f"{whole} in {seconds / _UNITS[unit]:,.2f} {unit}, {hours:,.0f} GPU hours"]


def own_text(tasks: Sequence[Task], shown: Sequence[Candidate], device: Device) -> str:
    """The split that each of ``tasks`` has; of two, what the second changes."""
    if len(shown) == 2:
        return _pair_text(tasks, shown, device)
    (task,), (only,) = tasks, shown
    missing = [f"note: {_misfit(task, only, device)}"] if only.needed > device.memory else []
    return "\n".join(
        [
            *_heading(task, "on", only, device),
            "",
            *_table(task, shown, device),
            "",
            *_methods(task, only, device),
            *_memory(only, device),
            *_cost(task, only),
            *missing,
        ]
    )


def _pair_text(tasks: Sequence[Task], pair: Sequence[Candidate], device: Device) -> str:
    (task, _), (one, two) = tasks, pair
    change = two.step.seconds / one.step.seconds - 1
    return "\n".join(
        [
            *_heading(task, "on", one, device),
            "",
            *_table(task, pair, device),
            "",
            f"a step takes {abs(change):.1%} {'longer' if change > 0 else 'less'} with the change",
            *(f"  {name:18} {one.shares[name]:6.1%} -> {two.shares[name]:6.1%}" for name in one.shares),
            *_more_devices(one, two),
            *(
                f"note: {_misfit(own, each, device)}"
                for own, each in zip(tasks, pair, strict=True)
                if each.needed > device.memory
            ),
        ]
    )


def _more_devices(one: Candidate, two: Candidate) -> list[str]:
    """A note where the two run on different numbers of devices, of which a faster step says nothing by itself."""
    if one.split.ranks == two.split.ranks:
        return []
    return [f"note: on {two.split.ranks} devices, not {one.split.ranks}; to compare on as many, add --gpus"]


def _misfit(task: Task, each: Candidate, device: Device) -> str:
    return f"{_settings(task, each)} needs {_held(each, device)}"


def own_record(task: Task, shown: Sequence[Candidate], device: Device) -> dict[str, Any]:
    """The same as data."""
    return {
        "device": device.name,
        "reading": task.reading,
        "candidates": [_record(task, each, device) for each in shown],
    }


def choice_record(task: Task, found: Choice, device: Device, install: Sequence[str]) -> dict[str, Any]:
    """The best candidates, counts of what was left out by reason, what to install; seconds, bytes, fractions."""
    from megatron_run_planner.commands.methods import compare

    return {
        "device": device.name,
        "model": model_record(task.model),
        "reading": task.reading,
        "methods": [asdict(each) for each in compare(task.model, found.best[0].split, device)],
        "best": [_record(task, each, device) for each in found.best],
        "install": list(install),
        "tried": found.tried,
        "pruned": {reason: count for reason, count in found.pruned.items() if count},
    }


def model_record(model: ModelCosts) -> dict[str, Any]:
    """A model as data: each kind of its layers once, with the number of layers of it."""
    kinds = [{"count": count, **asdict(layer)} for count, layer in model.kinds.counts]
    totals = {"parameters": model.parameters, "flops_per_token": model.flops_per_token}
    return {**asdict(replace(model, layers=model.layers[:1], divided=())), **totals, "layers": kinds}


def _record(task: Task, each: Candidate, device: Device) -> dict[str, Any]:
    return {
        "split": {**asdict(each.split), "layers": each.uneven},
        "schedule": each.schedule,
        "seconds": each.step.seconds,
        "waiting": each.step.waiting,
        "mfu": each.step.mfu(task.model, each.split, device),
        "shares": each.shares,
        "limit": each.limit,
        "tensors": each.tensors,
        "memory_needed": each.needed,
        "memory_by_stage": [asdict(rank) for rank in each.memory],
        "fits": each.needed <= device.memory,
    }


def found_text(task: Task, answer: Answer, device: Device) -> str:
    """The schedule that was found beside the installed ones, fastest first."""
    split = answer.candidate.split
    rows = [(answer.candidate, f"searched: {_dealt(answer)}"), *((each, each.schedule) for each in answer.fitting)]
    rows += [(each, f"{each.schedule} (does not fit)") for each in answer.too_large]
    batch = f"{split.microbatches} microbatches, {device.name}"
    return "\n".join(
        [
            f"{task.model.parameters / 1e9:.1f}B parameters over {split.pipeline} stages, {batch}",
            *_reading(task),
            "",
            "    step  waiting      memory  chunks  schedule",
            *(
                f"{each.step.seconds:7.3f}s  {each.step.waiting:7.1%}  {each.tensors / _GIB:6.1f} GiB  "
                f"{each.split.chunks:6}  {name}"
                for each, name in rows
            ),
            "",
            _gain(answer),
            f"no order takes less than {answer.bound:.3f}s with the layers of these places",
        ]
    )


def _dealt(answer: Answer) -> str:
    """The layers of each place in model order, and the stages where they do not follow one another."""
    layout = answer.candidate.plan.layout
    layers = " ".join(str(len(place.layers)) for place in layout)
    if all(place.stage == index % answer.candidate.plan.stages for index, place in enumerate(layout)):
        return f"layers {layers}"
    return f"layers {layers} on stages {' '.join(str(place.stage) for place in layout)}"


def _gain(answer: Answer) -> str:
    """How the found schedule compares with the best installed one."""
    if not answer.fitting:
        return "no installed schedule fits"
    best, found = answer.fitting[0], answer.candidate
    saved = 1 - found.step.seconds / best.step.seconds
    if saved < 5e-4:
        return f"nothing found that beats {best.schedule}"
    return f"{saved:.1%} less than {best.schedule}, the best installed one that fits"


def found_line(answer: Answer, device: Device) -> str:
    """The comment of the written file."""
    return f"Predicted: {answer.candidate.step.seconds:.3f} s a step on {device.name}, {_gain(answer)}."


def found_record(task: Task, answer: Answer, device: Device) -> dict[str, Any]:
    """The same as data; ``lists`` as in the written file."""
    plan = answer.candidate.plan
    return {
        "device": device.name,
        "reading": task.reading,
        "searched": _record(task, answer.candidate, device),
        "bound": answer.bound,
        "places": [[place.stage, place.chunk, len(place.layers)] for place in plan.layout],
        "lists": [" ".join(map(str, actions)) for actions in plan.lists],
        "installed": [_record(task, each, device) for each in (*answer.fitting, *answer.too_large)],
    }


def yield_text(task: Task, best: Candidate, device: Device, conditions: Conditions, month: Yield, days: float) -> str:
    """The rest of a month, where the rest goes, and the interval between saves beside Young's."""
    record = yield_record(task, best, conditions, month, days)
    shares = {
        "kept work": month.useful,
        "waiting for the slowest machine": month.straggling,
        "saving": month.saving,
        "lost since the last save": month.lost,
        "restarting": month.restarting,
    }
    lost = f"a save stalls {conditions.stall:g} s, a restart takes {conditions.restart / 60:g} min"
    often = f"{month.failures:.1f} failures, one every {conditions.between_failures / 3600:.2f} h"
    return "\n".join(
        [
            *_heading(task, "on", best, device),
            f"a device fails every {conditions.mtbf / 3600:g} h, {lost}",
            f"{_settings(task, best)}: a step of {best.step.seconds:.3f} s",
            f"{days:g} days on {conditions.devices} devices: {often}",
            *(f"  {share:6.1%}  {name}" for name, share in shares.items()),
            f"saves every {month.interval / 60:.1f} min (Young and Daly: {record['young_daly'] / 60:.1f} min)",
            f"{record['tokens']:.3g} tokens; nine months in ten keep {month.low:.1%} to {month.high:.1%} of the time",
        ]
    )


def yield_record(task: Task, best: Candidate, conditions: Conditions, month: Yield, days: float) -> dict[str, Any]:
    """The same as data: seconds, fractions of the wall time."""
    from megatron_run_planner.goodput import expected_useful, young_daly

    steps = days * _DAY * month.useful / best.step.seconds
    return {
        **asdict(month),
        "conditions": asdict(conditions),
        "young_daly": young_daly(conditions),
        "expected": expected_useful(conditions, month.interval) / conditions.straggling,
        "seconds": best.step.seconds,
        "tokens": steps * best.split.global_batch * task.model.sequence,
    }
