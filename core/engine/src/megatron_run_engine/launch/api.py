"""The entry points: decide where the ranks come from, run them, return how the run ended."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_run.errors import NOT_BEGUN, CheckpointError, ExitCode, InputError, RunError, ended_with
from megatron_run_engine.host.environments import LaunchMode, find_world
from megatron_run_engine.host.process import (
    assign_device,
    borrowed_process,
    check_local_devices,
    forks_ranks,
    kept_settings,
)
from megatron_run_engine.launch.attempts import (
    already_finished,
    checked,
    job_of,
    last_step,
    on_ranks,
    refuse_objects,
    start_local,
)
from megatron_run_engine.launch.failures import exit_code, interrupted, last_line, without_logs
from megatron_run_engine.launch.job import LaunchOptions, RunResult
from megatron_run_engine.launch.planned import at_once, with_planned_sizes
from megatron_run_engine.launch.rank_output import flush_output, terminal_writer
from megatron_run_engine.run_folder import recording_refusals
from megatron_run_engine.runtime.cuda_libraries import environment_kept
from megatron_run_engine.runtime.world import World

if TYPE_CHECKING:
    from megatron_run.config.request import Request
    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.launch.job import RankTask
    from megatron_run_engine.launch.planned import Decide
    from megatron_run_engine.launch.rendezvous import ResolveRun

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
            run = resolve(request)
        return _start_here(run, options)
    with environment_kept():
        return _launch_joined(request, world, options)


def _start_here(run: ResolvedRun, options: LaunchOptions) -> RunResult:
    """Start the local ranks of ``run``, once it is checked."""
    with recording_refusals(run.config.run.folder):
        with ended_with(NOT_BEGUN):
            run = checked(run)
        return start_local(run, options)


def _checked(run: ResolvedRun, world: World) -> ResolvedRun:
    """``run`` as a rank of ``world`` begins it, once it is checked."""
    with recording_refusals(run.config.run.folder if world.rank == 0 else None):
        return checked(run)


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

    def resolved(latest: Mapping[str, str], decide: Decide) -> ResolvedRun:
        run = resolve(with_planned_sizes(replace(there, latest=latest), decide))
        if run.config.run.elastic == "off" and request.nproc not in (None, world.size):
            raise InputError(
                f"--nproc {request.nproc} in a world of {world.size} ranks",
                why=f"{world.launcher} has started {world.size}",
                fix="leave --nproc out, or set run.elastic",
            )
        return _checked(run, world)

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
        there = world

        def resolved(latest: Mapping[str, str], decide: Decide) -> ResolvedRun:
            return _checked(_with_latest(_of_size(run, there, decide), latest), there)

        result = _join(resolved, world, LaunchOptions())
    elif here:
        with recording_refusals(run.config.run.folder):
            result = _train_here(checked(run))
    else:
        refuse_objects(run)
        result = _start_here(run, LaunchOptions())
    if result.code == ExitCode.SIGINT:
        raise KeyboardInterrupt
    if result.code and not here:
        raise FailedRunError(result)
    return result


def _of_size(run: ResolvedRun, world: World, decide: Decide = at_once) -> ResolvedRun:
    if run.sizes.world == world.size:
        return run
    if run.config.run.elastic != "off":
        return on_ranks(run, world.size, decide)
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


def _train_here(run: ResolvedRun) -> RunResult:
    """Train in this process, which is somebody's program or notebook: what training sets in it is restored."""
    from megatron_run_engine.launch.worker import stop_request, train_in_folder
    from megatron_run_engine.run_folder import open_run_folder

    world = assign_device(run, World())
    with borrowed_process(run, world):
        opened = open_run_folder(run, sys.argv)
        with opened.lock:
            if opened.finished:
                return already_finished(opened, print)
            try:
                code = train_in_folder(run, world, opened.folder, stop_request(run))
            except BaseException as error:
                with suppress(CheckpointError):  # the first failure is told
                    opened.end(exit_code(error), last_line(error, opened.folder.path, run))
                raise
            how = f"stopped by {code.name}"
            message = interrupted(how, opened.folder.path, run) if code is ExitCode.SIGINT else ""
            opened.end(code, message)
        gc.collect()  # what was trained is full of cycles, and Python counts objects, not bytes
        return RunResult(code, opened.folder.path, message, steps=last_step(opened.folder))


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
        job = replace(job_of(run, folder, options, fork=fork), task=task)
        result = run_local(job, options.tell, None if options.quiet else terminal_writer())
        if result.code == ExitCode.SIGINT:
            raise KeyboardInterrupt
        if result.code:
            if result.code == ExitCode.BUG:
                options.tell(folder.log(0).read_text(errors="replace"))  # it is about to be removed
            raise FailedRunError(replace(result, folder=None, message=without_logs(result.message, folder)))
        return replace(result, folder=None)


def _join(resolve_run: ResolveRun, world: World, options: LaunchOptions) -> RunResult:
    """This process is a rank of a world that torchrun or Slurm made: run it, with its message if it is to print one."""
    from megatron_run_engine.launch.worker import RankWorker
    from megatron_run_engine.run_folder import REFUSALS

    with _kept_descriptors(1, 2), kept_settings():
        worker = RankWorker(resolve_run, world, options)
        result = worker.run()
    folder, message = worker.folder, result.message
    rank = result.rank  # by which it trains, where others are left out
    if message and folder is not None and rank > 0:
        first, newline, others = message.partition("\n")
        message = f"{first} (rank {rank}, log: {folder.log(rank)}){newline}{others}"
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
