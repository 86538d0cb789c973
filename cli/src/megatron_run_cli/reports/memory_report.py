"""The memory of each stage's ranks as stacked bars, and whether it fits a device and what to turn when it does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_run.errors import RunError
from megatron_run.pipeline.picture import BAR, MARGIN, ROW, STAGE, swatches
from megatron_run.planning.run import sections
from megatron_run_cli.output import write_file

if TYPE_CHECKING:
    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.estimate.model_size import ModelSize
    from megatron_run_planner.devices import Device
    from megatron_run_planner.memory import RankMemory
    from megatron_run_planner.remedies import Remedies, Remedy
    from megatron_run_planner.task import Task

#: What allocator, context and libraries take beside the tensors, where there is a device.
_RESERVE = "reserve"
#: What a rank holds by role, bottom up: the letter in a bar, and Okabe and Ito's colours.
ROLES = {
    "parameters": ("p", "#0072b2"),
    "gradients": ("g", "#56b4e9"),
    "masters": ("m", "#009e73"),
    "main_gradients": ("n", "#8fd3c0"),
    "lent": ("l", "#bdd7ee"),
    "state": ("s", "#f0e442"),
    "optimizer": ("o", "#009e73"),
    "frozen": ("f", "#999999"),
    "activations": ("a", "#e69f00"),
    "temporaries": ("t", "#d55e00"),
    "communication": ("c", "#cc79a7"),
    _RESERVE: ("x", "#d9d9d9"),
}
#: What begins so lies in host memory: a copy of the state for asynchronous saves, and state that is updated there.
ON_HOST = ("staging", "host_")
#: What a step takes beside parameters and state.
_OF_A_STEP = ("activations", "temporaries", "communication")
_WIDTH, _PIXELS, _GIB, _MIB = 80, 640.0, 2**30, 2**20


@dataclass(frozen=True)
class StageMemory:
    """Bytes by role of a rank of each stage; ``device`` is what they should fit, ``task`` the planner's view, if any.

    ``counted``: what a step takes was counted in the very layers, and is not the planner's.
    """

    stages: tuple[Mapping[str, float], ...]
    device: Device | None
    task: Task | None
    counted: bool

    @property
    def tensors(self) -> list[float]:
        """Bytes of the tensors of each stage, of which most live at once: what torch's peak of a GPU tells."""
        return [sum(held for role, held in stage.items() if role != _RESERVE) for stage in self.stages]

    @property
    def needed(self) -> list[float]:
        """Bytes of each stage: of the tensors and the reserve."""
        return [sum(stage.values()) for stage in self.stages]

    @property
    def fits(self) -> bool:
        """Whether every stage fits the device."""
        return self.device is None or max(self.needed) <= self.device.memory

    @cached_property
    def remedies(self) -> Remedies | None:
        """The remedies; None where it fits, or without the planner."""
        if self.fits or self.task is None or self.device is None:
            return None
        from megatron_run_planner.remedies import remedies
        from megatron_run_planner.schedules import Schedules

        return remedies(self.task, self.device, Schedules(), max(self.needed))


def stage_memories(
    run: ResolvedRun,
    size: ModelSize | None,
    counted: Sequence[Mapping[str, int]] | None,
    device: Device | None,
) -> StageMemory:
    """The memory of ``run``: ``size``, and what else is ``counted`` at a step's peak; uncounted, the planner's.

    With ``device``, what allocator, context and libraries take is part of it (``reserve``).
    """
    task = _task(run)
    planned = _planned(task, run) if task else None
    found = []
    for stage in range(run.sizes.pipeline):
        if size is None:
            held: dict[str, float] = asdict(planned[stage]) if planned else {}
        else:
            held = {role: held for role, held in size.stages[stage].memory.items() if not role.startswith(ON_HOST)}
            if counted is not None:
                held |= counted[stage]
            elif planned:
                estimate = planned[stage]
                held |= {role: getattr(estimate, role) for role in _OF_A_STEP}
        if device:
            from megatron_run_planner.memory import with_reserve

            total = sum(held.values())
            held[_RESERVE] = with_reserve(total) - total
        found.append({role: held[role] for role in ROLES if held.get(role)})
    return StageMemory(tuple(found), device, task, counted is not None)


def _planned(task: Task, run: ResolvedRun) -> list[RankMemory]:
    from megatron_run_planner.memory import stage_memory

    return stage_memory(task.model, task.split, run.plans[max(run.plans)])


def _task(run: ResolvedRun) -> Task | None:
    """The run as the planner sees it; None without the planner, and where it reads none."""
    if find_spec("megatron_run_planner") is None:
        return None
    from megatron_run.config.request import Request
    from megatron_run_planner.task import read_task

    try:
        task = read_task(Request((sections(run),)), run.sizes.world)
    except RunError:
        return None
    return replace(task, split=replace(task.split, data=run.sizes.data))


def memory_text(memory: StageMemory, kind: str = "") -> str:
    """A bar a stage, and with a device whether it fits; without one ``kind`` is that by which layers were counted."""
    device, needed = memory.device, memory.needed
    scale = max([*needed, device.memory if device else 0.0]) / _WIDTH or 1.0
    limit = round(device.memory / scale) if device else _WIDTH
    of = f", of {_amount(device.memory)} on {device.name}" if device else f", {_paths(memory, kind)}" if kind else ""
    lines = [f"memory of a rank{of}"]
    for stage, (held, tensors) in enumerate(zip(memory.stages, memory.tensors, strict=True)):
        bar = _bar(held, scale).ljust(limit)
        lines.append(f"stage {stage} |{bar[:limit]}|{bar[limit:]} {_amount(tensors)}")
    used = [role for role in ROLES if any(role in held for held in memory.stages)]
    lines.append(", ".join(f"{ROLES[role][0]} {role.replace('_', ' ')}" for role in used))
    return "\n".join([*lines, *([_verdict(memory), *_advice(memory)] if device else [])])


def _paths(memory: StageMemory, kind: str) -> str:
    """Whose count it is: on a CPU layers keep other pieces than on a GPU, such as attention's probabilities."""
    how = (
        f"as on a {kind}" if memory.counted else "by the planner, as on a GPU" if memory.task else "without activations"
    )
    return f"{how}; --device NAME: as on that device"


def _bar(held: Mapping[str, float], scale: float) -> str:
    """Letters, each ``scale`` bytes: a role ends where all up to it do, so that no rounding adds up."""
    bar, end = "", 0.0
    for role, size in held.items():
        end += size
        bar += ROLES[role][0] * (round(end / scale) - len(bar))
    return bar


def _verdict(memory: StageMemory) -> str:
    device = memory.device
    assert device is not None, "a verdict is on a device"
    stage, most = max(enumerate(memory.needed), key=lambda pair: pair[1])
    room = device.memory - most
    rest = f"{_amount(abs(room))} {'to spare' if room >= 0 else 'too much'}"
    source = "" if memory.counted else "; activations by the planner" if memory.task else "; activations not counted"
    fits = "fits" if memory.fits else "does not fit"
    tensors = memory.tensors[stage]
    held = f"{_amount(tensors)} of tensors and {_amount(most - tensors)} in reserve"
    return f"{fits} {device.name}: stage {stage} needs {held}, {rest}{source}"


def _advice(memory: StageMemory) -> Iterator[str]:
    """The remedies, by the planner's numbers: memory of the fullest rank, and the step's time over today's."""
    found, device = memory.remedies, memory.device
    if found is None or device is None:
        return
    enough = [each for each in found.alone if each.needed <= device.memory]
    short = [each for each in found.alone if each.needed > device.memory]
    if memory.task and memory.task.reading and found.alone:
        yield f"  by the planner, which reads {memory.task.reading}:"
    if enough:
        yield f"  enough: {_listed(enough)}"
    if short:
        yield f"  not enough alone: {_listed(short)}"
    if found.together:
        yield f"  together enough: {_listed([found.together])}"
    elif not enough:
        world = memory.task.split.ranks if memory.task else 1
        why = "not enough together either; " if short else ""
        yield f"  {why}every split: megatron-run plan CONFIG --gpus {world}"


def _listed(found: Sequence[Remedy]) -> str:
    return "; ".join(
        f"{' '.join(each.settings)} ({_amount(each.needed)}, {_slower(each)}, {each.devices} devices)" for each in found
    )


def _slower(each: Remedy) -> str:
    return f"step {round(100 * each.slowdown) - 100:+d}%"


def memory_record(memory: StageMemory) -> dict[str, Any]:
    """The same as data: bytes, and times over today's."""
    record: dict[str, Any] = {
        "by_stage": [dict(held) for held in memory.stages],
        "tensors_by_stage": memory.tensors,
        "needed_by_stage": memory.needed,
    }
    if memory.device is not None:
        found = memory.remedies
        record |= {"device": memory.device.name, "memory": memory.device.memory, "fits": memory.fits}
        record["remedies"] = [asdict(each) for each in found.alone] if found else []
        record["together"] = asdict(found.together) if found and found.together else None
    return record


def write_memory_svg(memory: StageMemory, file: Path) -> None:
    """Draw the bars. Raises :class:`InputError` when the file cannot be written."""
    write_file(file, "\n".join(_svg(memory)) + "\n")


def _svg(memory: StageMemory) -> Iterator[str]:
    device, left, top = memory.device, MARGIN + STAGE, MARGIN + 30
    limit = device.memory if device else 0.0
    scale = _PIXELS / max(*memory.needed, limit, 1.0)
    bottom, width = top + ROW * len(memory.stages), left + _PIXELS + MARGIN + STAGE
    title = f"memory of a rank{f' of {device.name}' if device else ''}"
    yield f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{bottom + 40:g}" role="img">'
    yield f"<title>{escape(title)}</title>"
    yield "<style>text { font-family: Helvetica, Arial, sans-serif; font-size: 12px; fill: #141414; }</style>"
    yield f'<rect width="{width:g}" height="{bottom + 40:g}" fill="#ffffff"/>'
    yield f'<text x="{MARGIN}" y="{MARGIN + 10}">{escape(title)}</text>'
    for stage, held in enumerate(memory.stages):
        x, y = float(left), top + ROW * stage
        yield f'<text x="{MARGIN}" y="{y + BAR / 2 + 4:g}">stage {stage}</text>'
        for role, size in held.items():
            about = f"{role.replace('_', ' ')}: {_amount(size)}"
            place = f'x="{x:.2f}" y="{y:g}" width="{size * scale:.2f}" height="{BAR}"'
            yield f'<rect class="{role}" {place} fill="{ROLES[role][1]}"><title>{about}</title></rect>'
            x += size * scale
        yield f'<text x="{x + 6:.2f}" y="{y + BAR / 2 + 4:g}">{_amount(memory.tensors[stage])}</text>'
    if device:
        x = left + limit * scale
        yield f'<line class="limit" x1="{x:.2f}" y1="{top - 8}" x2="{x:.2f}" y2="{bottom:g}" stroke="#000000"/>'
    used = [role for role in ROLES if any(role in held for held in memory.stages)]
    yield from swatches([(ROLES[role][1], role.replace("_", " ")) for role in used], bottom + 10)
    yield "</svg>"


def _amount(size: float) -> str:
    return f"{size / _GIB:,.1f} GiB" if size >= _GIB else f"{size / _MIB:,.1f} MiB"
