"""The entry points: decide where the ranks come from, run them, return how the run ended."""

from __future__ import annotations

import gc
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_run.errors import NOT_BEGUN, CheckpointError, ExitCode, InputError, RunError, ended_with
from megatron_run_engine.estimate.machine_room import known_to_lack_memory
from megatron_run_engine.host.environments import LaunchMode, find_world
from megatron_run_engine.host.process import (
    assign_device,
    borrowed_process,
    check_local_devices,
    forks_ranks,
    kept_settings,
)
from megatron_run_engine.host.rank_environment import threads_per_rank
from megatron_run_engine.launch.failures import (
    exit_code,
    how_to_resume,
    interrupted,
    last_line,
    last_saved,
    without_logs,
)
from megatron_run_engine.launch.job import Job, LaunchOptions, RunResult
from megatron_run_engine.launch.planned import with_planned_sizes
from megatron_run_engine.launch.rank_output import flush_output, terminal_environment, terminal_writer
from megatron_run_engine.launch.restarts import Restarts, resumed
from megatron_run_engine.runtime.cuda_libraries import environment_kept
from megatron_run_engine.runtime.world import World

if TYPE_CHECKING:
    from megatron_run.config.request import Request
    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.launch.job import RankTask
    from megatron_run_engine.launch.rendezvous import ResolveRun
    from megatron_run_engine.run_folder import OpenedFolder, RunFolder

#: How other launchers start ranks again.
_RESTARTING = {
    "torchrun": "write torchrun --max-restarts N before -m megatron_run_cli",
    "slurm": "submit the job with --requeue",
}


class FailedRunError(RunError):
    """Ranks that were started failed: ``result`` has the exit code and the run folder."""

    def __init__(self, result: RunResult) -> None:
        super().__init__(result.message or f"the run ended with exit code {int(result.code)}")
        self.exit_code = result.code
        self.result = result


def launch(request: Request, options: LaunchOptions, mode: LaunchMode = "auto") -> RunResult:
    """Train what ``request`` asks for, and return how it ended.

    ``auto`` joins the world that torchrun or Slurm made, else starts the local ranks. Raises :class:`RunError` for
    what is found before a rank starts; a failure of a rank is in the result.
    """
    world = find_world(os.environ, mode)
    if world is None:
        from megatron_run.planning import resolve

        with ended_with(NOT_BEGUN):
            run = _checked(resolve(request))
        return _start_local(run, options)
    with environment_kept():
        return _launch_joined(request, world, options)


def _launch_joined(request: Request, world: World, options: LaunchOptions) -> RunResult:
    """Be one rank of the ``world`` that torchrun or Slurm made."""
    from megatron_run.planning import resolve

    if options.max_restarts:
        raise InputError(
            f"--max-restarts {options.max_restarts} in a world of {world.launcher}",
            why="only who started the ranks can start them again",
            fix=_RESTARTING[world.launcher],
        )
    there = replace(request, there=world.size)

    def resolved(latest: Mapping[str, str]) -> ResolvedRun:
        run = resolve(with_planned_sizes(replace(there, latest=latest)))
        if run.config.run.elastic == "off" and request.nproc not in (None, world.size):
            raise InputError(
                f"--nproc {request.nproc} in a world of {world.size} ranks",
                why=f"{world.launcher} has started {world.size}",
                fix="leave --nproc out, or set run.elastic",
            )
        return _checked(run)

    return _join(resolved, world, options)


def train(
    run: ResolvedRun,
    *,
    resume: str | int = "auto",
    extend: bool = False,
    allow_change: Sequence[str] = (),
    allow_plugin_change: Sequence[str] = (),
) -> RunResult:
    """Train ``run`` from Python: in this process when it is a world of one, else on local ranks.

    ``resume`` selects the saved step of the run folder to resume from: the newest (``auto``), one by its number, or
    none (``never``). A run that is resumed may have more steps with ``extend``, and other values of the keys and
    sections in ``allow_change`` (``train.lr``, ``data``). ``allow_plugin_change`` names kinds whose saved state may be
    dropped (``optimizer``, ``scaler``).

    In a program that torchrun or srun has started, this process is one rank of its world. Raises what training raises
    in this process, and :class:`FailedRunError` for ranks elsewhere.
    """
    if isinstance(run, str | os.PathLike | Mapping):
        raise InputError("train takes a run, and was given a configuration", fix="pass it to load_config first")
    request = replace(
        run.request,
        resume=str(resume),
        extend=extend,
        allow_change=tuple(allow_change),
        allow_plugin_change=tuple(allow_plugin_change),
    )
    run = replace(run, request=request)
    world = find_world(os.environ)
    here = world is None and run.sizes.world == 1
    if world is not None:
        result = _join(lambda latest: _checked(_with_latest(_of_size(run, world), latest)), world, LaunchOptions())
    elif here:
        result = _train_here(_checked(run))
    else:
        _refuse_objects(run)
        result = _start_local(_checked(run), LaunchOptions())
    if result.code == ExitCode.SIGINT:
        raise KeyboardInterrupt
    if result.code and not here:
        raise FailedRunError(result)
    return result


def _of_size(run: ResolvedRun, world: World) -> ResolvedRun:
    if run.sizes.world == world.size:
        return run
    if run.config.run.elastic != "off":
        _refuse_objects(run)
        return _on_ranks(run, world.size)
    raise InputError(
        f"a run of {run.sizes.world} ranks in a world of {world.size}",
        why=f"{world.launcher} has started {world.size}",
        fix=f"resolve it with nproc={world.size}, or set run.elastic",
    )


def _with_latest(run: ResolvedRun, latest: Mapping[str, str]) -> ResolvedRun:
    """``run``, which a program has resolved on this rank. Raises :class:`InputError` if rank 0 read ``latest`` else."""
    if latest and dict(run.request.latest) != dict(latest):
        raise InputError(
            f"the ranks found different runs in {', '.join(latest)}",
            why="another run has begun while they read it",
            fix="name the run itself, or start again",
        )
    return run


def _checked(run: ResolvedRun) -> ResolvedRun:
    """``run``, once its initial weights are known to exist and its layers to split over its ranks.

    Only the layers know what they divide, and which segments they have, so the model is built on the meta device,
    and a refusal comes before anything is written. Layers that serve neither ``parallel.tensor`` nor
    ``parallel.context`` divide nothing. What fails for any other reason is left to the ranks.
    """
    from megatron_run_engine.training.state.init_from import check_source, unloaded_weights

    check_source(run)
    if notice := unloaded_weights(run):
        run = replace(run, notices=(*run.notices, notice))
    dividing = {"parallel.tensor", "parallel.context"}
    divides = any(dividing & plugin.provides for plugin in chain.from_iterable(run.plugins.values()))
    train = run.config.train
    named = isinstance(train.recompute, tuple) or isinstance(train.offload, tuple)
    if divides or named or run.one("graph-capture").name != "none":
        from megatron_run_engine.estimate.model_size import model_size

        try:
            model_size(run)
        except RunError:
            raise
        except Exception as unknown:  # a model that needs its device to be built
            logging.getLogger("megatron_run").debug("the layers were not made in advance", exc_info=unknown)
    return run


def _refuse_objects(run: ResolvedRun) -> None:
    """Raise :class:`InputError` for plugins that are objects of this process, which cannot be handed over."""
    handed_in = [str(plugin) for stack in run.plugins.values() for plugin in stack if plugin.entry is None]
    if handed_in:
        raise InputError(
            f"a run of {run.sizes.world} ranks cannot use {', '.join(handed_in)}",
            why="the ranks are processes of their own, and cannot see an object of this one",
            fix="write the plugin into a file and name the file, as in schedule=./mine.py, or start with torchrun",
        )


def _train_here(run: ResolvedRun) -> RunResult:
    """Train in this process, which is somebody's program or notebook: what training sets in it is restored."""
    from megatron_run_engine.launch.worker import train_in_folder
    from megatron_run_engine.run_folder import open_run_folder

    world = assign_device(run, World())
    with borrowed_process(run, world):
        opened = open_run_folder(run, sys.argv)
        with opened.lock:
            if opened.finished:
                return _already_finished(opened, print)
            try:
                code = train_in_folder(run, world, opened.folder)
            except BaseException as error:
                with suppress(CheckpointError):  # the first failure is told
                    opened.end(exit_code(error), last_line(error, opened.folder.path, run))
                raise
            how = f"stopped by {code.name}"
            message = interrupted(how, opened.folder.path, run) if code is ExitCode.SIGINT else ""
            opened.end(code, message)
        gc.collect()  # what was trained is full of cycles, and Python counts objects, not bytes
        return RunResult(code, opened.folder.path, message, steps=_last_step(opened.folder))


def _start_local(run: ResolvedRun, options: LaunchOptions) -> RunResult:
    """Start the ranks, and start them again as often as ``options`` allow and it makes sense."""
    devices = check_local_devices(run)
    fork = forks_ranks(run.config.run.start_method, devices)
    lacks = known_to_lack_memory(run) if set(devices) == {"cpu"} else ""
    for notice in (*run.notices, *([f"memory will not suffice: {lacks}"] if lacks else [])):
        options.tell(notice)
    full, elastic = run.sizes.world, run.config.run.elastic != "off"
    restarts, typed = Restarts(options.max_restarts, full, elastic), run
    result = _attempt(run, options, typed, fork=fork)
    while result.folder is not None and (line := restarts.next(result)) is not None:
        try:
            run = resumed(_on_ranks(typed, len(restarts.left)), result.folder)
        except RunError as refusal:
            result = replace(result, message=f"{result.message}; not started again: {refusal}")
            break
        for news in (line, *(notice for notice in run.notices if notice not in typed.notices)):
            options.tell(news)
        restarts.places = restarts.left[: run.sizes.world]
        result = _attempt(run, options, typed, fork=fork, places=restarts.places, why=line)
    if result.folder is not None and result.code.retry and (step := last_saved(result.folder)) is not None:
        options.tell(f"step {step} is saved: {how_to_resume(result.folder, typed)}")
    return result


def _on_ranks(typed: ResolvedRun, there: int) -> ResolvedRun:
    """The run that was ``typed`` on as many of ``there`` ranks as fit. Raises :class:`RunError` where none do."""
    from megatron_run.planning import resolve

    if there == typed.sizes.world:
        return typed
    return _checked(resolve(with_planned_sizes(replace(typed.request, there=there))))


def _attempt(
    run: ResolvedRun,
    options: LaunchOptions,
    typed: ResolvedRun,
    *,
    fork: bool,
    places: Sequence[int] = (),
    why: str = "",
) -> RunResult:
    """One attempt in the run folder, from its opening to its end; ``typed`` is what the first one was of.

    ``places`` are the local numbers of its ranks, and ``why`` is what led to it.
    """
    from megatron_run_engine.launch.local import run_local
    from megatron_run_engine.run_folder import open_run_folder

    opened = open_run_folder(run, options.arguments, why)
    with opened.lock:
        if opened.finished:
            return _already_finished(opened, options.tell)
        job = replace(_job(run, opened.folder, options, fork=fork), places=places)
        job = job if options.quiet else replace(job, shown=terminal_environment())
        try:
            result = run_local(job, options.tell, None if options.quiet else terminal_writer())
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


def _job(run: ResolvedRun, folder: RunFolder, options: LaunchOptions, *, fork: bool) -> Job:
    from megatron_run.planning.run_text import hand_over

    size, asked = run.sizes.world, run.config.run
    threads = threads_per_rank(asked.threads, size)
    return Job(hand_over(run), folder.path, folder.attempt, size, threads, fork, options.debug, asked.timeout)


def run_task(run: ResolvedRun, task: RankTask, options: LaunchOptions) -> RunResult:
    """Do ``task`` on local ranks, as many as ``run`` has, and return how it ended; its run folder is temporary.

    Raises :class:`RunError` for what is found before a rank starts, and :class:`FailedRunError` when one fails.
    """
    from megatron_run_engine.launch.local import run_local
    from megatron_run_engine.run_folder import RunFolder

    if (world := find_world(os.environ)) is not None:
        why = f"{world.launcher} has started this process as one of {world.size} ranks"
        raise InputError("this command starts its ranks itself", why=why, fix=f"leave {world.launcher} out")
    fork = forks_ranks(run.config.run.start_method, check_local_devices(run))
    with tempfile.TemporaryDirectory(prefix="megatron-run-task-") as scratch:
        folder = RunFolder(Path(scratch), 1)
        folder.logs.mkdir(parents=True)
        job = replace(_job(run, folder, options, fork=fork), task=task)
        result = run_local(job, options.tell, None if options.quiet else terminal_writer())
        if result.code == ExitCode.SIGINT:
            raise KeyboardInterrupt
        if result.code:
            if result.code == ExitCode.BUG:
                options.tell(folder.log(0).read_text(errors="replace"))  # it is about to be removed
            raise FailedRunError(replace(result, folder=None, message=without_logs(result.message, folder)))
        return replace(result, folder=None)


def _already_finished(opened: OpenedFolder, tell: Callable[[str], None]) -> RunResult:
    path = opened.folder.path
    tell(f"run folder {path} is finished: nothing to do")
    return RunResult(ExitCode.DONE, path, steps=_last_step(opened.folder))


def _last_step(folder: RunFolder) -> int:
    status = folder.read_status()
    return status.step if status is not None else 0


def _join(resolve_run: ResolveRun, world: World, options: LaunchOptions) -> RunResult:
    """This process is a rank of a world that torchrun or Slurm made: run it, with its message if it is to print one."""
    from megatron_run_engine.launch.worker import RankWorker
    from megatron_run_engine.run_folder import REFUSALS

    with _kept_descriptors(1, 2), kept_settings():
        worker = RankWorker(resolve_run, world, options)
        result = worker.run()
    folder, message = worker.folder, result.message
    if message and folder is not None and world.rank > 0:
        first, newline, others = message.partition("\n")
        message = f"{first} (rank {world.rank}, log: {folder.log(world.rank)}){newline}{others}"
        if result.code in REFUSALS and not options.debug and not folder.begun:  # rank 0 takes it back, with its logs
            message = without_logs(message, folder)
    return RunResult(result.code, folder.path if folder else None, message)


@contextmanager
def _kept_descriptors(*descriptors: int) -> Iterator[None]:
    """Restore descriptors that the block may redirect."""
    copies = [os.dup(descriptor) for descriptor in descriptors]
    try:
        yield
    finally:
        flush_output()
        for copy, descriptor in zip(copies, descriptors, strict=True):
            os.dup2(copy, descriptor)
            os.close(copy)
