"""The attempts of a run on local ranks: each opens the run folder, starts the ranks, and says how they ended."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from megatron_run.errors import CheckpointError, ExitCode, InputError, RunError
from megatron_run_engine.estimate.machine_memory import known_to_lack_memory
from megatron_run_engine.host.environments import find_world
from megatron_run_engine.host.process import check_local_devices, forks_ranks
from megatron_run_engine.host.rank_environment import threads_per_rank
from megatron_run_engine.launch.failures import (
    exit_code,
    how_to_resume,
    in_memory,
    interrupted,
    last_line,
    what_is_saved,
    without_logs,
)
from megatron_run_engine.launch.job import Job, LaunchOptions, RunResult
from megatron_run_engine.launch.planned import at_once, with_planned_sizes
from megatron_run_engine.launch.rank_output import terminal_environment, terminal_writer
from megatron_run_engine.launch.restarts import Restarts, resumed
from megatron_run_engine.launch.start import Servers

if TYPE_CHECKING:
    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.launch.job import Lost
    from megatron_run_engine.launch.planned import Decide
    from megatron_run_engine.run_folder import OpenedFolder, RunFolder


def start_local(run: ResolvedRun, options: LaunchOptions) -> RunResult:
    """Start the ranks, and start them again as often as ``options`` allow and it makes sense."""
    devices = check_local_devices(run)
    fork = forks_ranks(run.config.run.start_method, devices)
    full, elastic = run.sizes.world + run.spares, run.config.run.elastic != "off"
    restarts, typed = Restarts(options.max_restarts, full, elastic), run
    tell_all(options, [restarts.leave_out(run.config.run.folder)])
    run = on_ranks(typed, len(restarts.left))
    lacks = known_to_lack_memory(run) if set(devices) == {"cpu"} else ""
    tell_all(options, [*run.notices, f"memory will not suffice: {lacks}" if lacks else ""])
    restarts.places = restarts.left[: run.sizes.world]
    with Servers() as servers:
        result = _attempt(run, options, typed, servers, fork=fork, start=Start(restarts.places))
        while result.folder is not None and result.code is ExitCode.RANK_LOST:
            try:
                news = [restarts.leave_out(result.folder)]
                line = restarts.next(result, in_memory(run, result))
                if line is None:
                    break
                run = resumed(on_ranks(typed, len(restarts.left)), result.folder)
            except RunError as refusal:
                result = replace(result, message=f"{result.message}; not started again: {refusal}")
                break
            tell_all(options, [line, *news, *(notice for notice in run.notices if notice not in typed.notices)])
            restarts.places = restarts.left[: run.sizes.world]
            start = Start(restarts.places, line, result.lost)
            result = _attempt(run, options, typed, servers, fork=fork, start=start)
    if result.folder is not None and result.code.retry and (line := what_is_saved(run, result)):
        options.tell(f"{line}: {how_to_resume(result.folder, typed)}")
    return result


def tell_all(options: LaunchOptions, lines: Iterable[str]) -> None:
    """Tell the user each of ``lines`` that says something."""
    for line in filter(None, lines):
        options.tell(line)


def checked(run: ResolvedRun) -> ResolvedRun:
    """``run``, once its initial weights are known to exist and its layers to split over its ranks.

    Only the layers know what they divide, and which segments they have, so the model is built on the meta device,
    and a refusal comes before anything is written. Layers that serve neither ``parallel.tensor`` nor
    ``parallel.context`` divide nothing. What fails for any other reason is left to the ranks.
    """
    from megatron_run_engine.training.state.init_from import check_source, unloaded_weights

    check_source(run)
    remembers = run.config.checkpoint.memory_interval.amount
    notices = (unloaded_weights(run), _check_memory_folder(run) if remembers else "")
    run = replace(run, notices=(*run.notices, *filter(None, notices)))
    dividing = {"parallel.tensor", "parallel.context"}
    divides = any(dividing & plugin.provides for plugin in chain.from_iterable(run.plugins.values()))
    train = run.config.train
    named = isinstance(train.recompute, tuple) or isinstance(train.offload, tuple)
    if divides or named or remembers or run.one("graph-capture").name != "none":
        from megatron_run_engine.estimate.model_size import model_size
        from megatron_run_engine.estimate.room_for_copies import check_room

        try:
            check_room(run, model_size(run), _local_ranks(run))
        except RunError:
            raise
        except Exception as unknown:  # a model that needs its device to be built
            logging.getLogger("megatron_run").debug("the layers were not made in advance", exc_info=unknown)
    return run


def _check_memory_folder(run: ResolvedRun) -> str:
    from megatron_run_engine.estimate.room_for_copies import check_folder

    return check_folder(run)


def _local_ranks(run: ResolvedRun) -> range:
    """The ranks of this host: all, unless torchrun or Slurm have started them."""
    world = find_world(os.environ)
    if world is None:
        return range(run.sizes.world)
    first = world.rank - world.local_rank
    return range(first, min(first + world.local_size, run.sizes.world))


def on_ranks(typed: ResolvedRun, there: int, decide: Decide = at_once) -> ResolvedRun:
    """The run that was ``typed`` on as many of ``there`` ranks as fit. Raises :class:`RunError` where none do."""
    from megatron_run.planning import resolve

    if there == typed.sizes.world + typed.spares:
        return typed
    refuse_objects(typed)
    return checked(resolve(with_planned_sizes(replace(typed.request, there=there), decide)))


def refuse_objects(run: ResolvedRun) -> None:
    """Raise :class:`InputError` for plugins that are objects of this process, which cannot be handed over."""
    handed_in = [str(plugin) for stack in run.plugins.values() for plugin in stack if plugin.entry is None]
    if not handed_in:
        return
    refused = f"a run of {run.sizes.world} ranks cannot use {', '.join(handed_in)}"
    in_a_file = "write the plugin into a file and name the file, as in schedule=./mine.py"
    if find_world(os.environ) is not None:
        why = "for another number of ranks it is resolved again, by the names of its plugins"
        raise InputError(refused, why=why, fix=f"{in_a_file}, or start {run.sizes.world} ranks")
    why = "the ranks are processes of their own, and cannot see an object of this one"
    raise InputError(refused, why=why, fix=f"{in_a_file}, or start with torchrun")


class Start(NamedTuple):
    """A start: the ``places`` of its ranks; after a lost one, ``why`` it is made, and when the rank was ``lost``."""

    places: Sequence[int]
    why: str = ""
    lost: Lost | None = None


def _attempt(
    run: ResolvedRun,
    options: LaunchOptions,
    typed: ResolvedRun,
    servers: Servers,
    *,
    fork: bool,
    start: Start,
) -> RunResult:
    """One attempt in the run folder, from its opening to its end; ``typed`` is what the first one was of."""
    from megatron_run_engine.launch.local import run_local
    from megatron_run_engine.run_folder import open_run_folder
    from megatron_run_engine.run_folder.restart_times import write_lost

    opened = open_run_folder(run, options.arguments, start.why)
    with opened.lock:
        if opened.finished:
            return already_finished(opened, options.tell)
        if start.lost is not None:
            write_lost(opened.folder, start.lost)
        job = replace(job_of(run, opened.folder, options, fork=fork), places=start.places)
        job = job if options.quiet else replace(job, shown=terminal_environment())
        try:
            show = None if options.quiet else terminal_writer()
            result = run_local(job, options.tell, show, servers=servers)
            if result.code == ExitCode.SIGINT:
                result = replace(result, message=interrupted(result.message, result.folder, typed))
        except BaseException as error:
            with suppress(CheckpointError):  # the first failure is told
                opened.end(exit_code(error), last_line(error, opened.folder.path, typed), keep=options.debug)
            raise
        with suppress(CheckpointError) if result.code else nullcontext():
            if opened.end(result.code, result.message, keep=options.debug):  # its logs are gone
                folder = opened.folder.path if opened.folder.path.exists() else None
                return replace(result, folder=folder, message=without_logs(result.message, opened.folder))
    return result


def job_of(run: ResolvedRun, folder: RunFolder, options: LaunchOptions, *, fork: bool) -> Job:
    """The job of the local ranks of ``run``, whose folder is open."""
    from megatron_run.planning.run_text import hand_over

    size, asked = run.sizes.world, run.config.run
    threads = threads_per_rank(asked.threads, size)
    return Job(hand_over(run), folder.path, folder.attempt, size, threads, fork, options.debug, asked.timeout)


def already_finished(opened: OpenedFolder, tell: Callable[[str], None]) -> RunResult:
    """The result of a start of a run that has reached its last step."""
    path = opened.folder.path
    tell(f"run folder {path} is finished: nothing to do")
    return RunResult(ExitCode.DONE, path, steps=last_step(opened.folder))


def last_step(folder: RunFolder) -> int:
    """The last step that is done, as ``folder`` says."""
    status = folder.read_status()
    return status.step if status is not None else 0
