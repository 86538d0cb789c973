"""The best layout of a run on the ranks that are left: what ``run.elastic=plan`` asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from megatron_run.errors import InputError
from megatron_run_planner.devices import Device, read_device
from megatron_run_planner.schedules import Schedules
from megatron_run_planner.task import Task, read_task, to_install, to_type

if TYPE_CHECKING:
    from megatron_run.config.request import Request
    from megatron_run_planner.search import Candidate

#: Numbers of ranks of which the fastest is taken: the largest over which anything fits.
_NUMBERS = 3
#: Candidates of each number among which one has all its plugins installed.
_KEPT = 20
#: Devices by what a GPU's name has, the longest first; without a GPU the processor's.
_DEVICES = {"A100-SXM4-40GB": "a100-40", "A100-PCIE-40GB": "a100-40", "A100": "a100"} | {
    name.upper(): name for name in ("b200", "h100", "h200")
}
_PROCESSOR = "cpu-2core"


def best_layout(request: Request, most: int, gpu: str) -> dict[str, str]:
    """The settings by key of the fastest layout of ``request`` over at most ``most`` ranks with a ``gpu`` of that name.

    Batches, optimizer and all else that decides what is learned stay. Raises :class:`InputError` where nothing fits,
    or the planner knows no such GPU.
    """
    task = read_task(request, None)
    task = replace(task, optimizers=(task.split.optimizer,))
    found = list(islice(_layouts(task, most, _device(gpu)), _NUMBERS))
    if not found:
        raise InputError(
            f"run.elastic=plan finds no layout for {most} rank{'s' if most > 1 else ''}",
            why="no split that divides the batch fits, with the schedules that are installed",
            fix="start more ranks, or set run.elastic=data to keep all sizes but the copies of the model",
        )
    best = min(found, key=lambda each: each.step.seconds)
    settings = dict(setting.split("=", 1) for setting in to_type(task, best))
    settings.pop("optimizer", None)
    return {**settings, "parallel.data": str(best.split.data)}


def _layouts(task: Task, most: int, device: Device) -> Iterator[Candidate]:
    """The fastest layout of each number of ranks over which anything fits, the largest number first."""
    schedules = Schedules()
    for ranks in range(most, 0, -1):
        search = task.search(ranks, device, schedules, micro_batches=(task.split.micro_batch,))
        try:
            best = search.run(_KEPT).best
        except InputError:
            continue
        installed = (each for each in best if not to_install(task, each, schedules.catalog))
        yield from islice(installed, 1)


def _device(gpu: str) -> Device:
    names: Mapping[str, str] = _DEVICES if gpu else {"": _PROCESSOR}
    for part, name in names.items():
        if part in gpu:
            return read_device(name)
    raise InputError(
        f"run.elastic=plan knows no device like {gpu!r}",
        fix="set run.elastic=data, which keeps all sizes but the copies of the model",
    )
