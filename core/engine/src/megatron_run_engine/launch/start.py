"""Decides where the ranks come from, and runs them."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

from megatron_run.config.request import Request
from megatron_run.errors import ExitCode, InputError, RunError
from megatron_run_engine.launch.job import Ending
from megatron_run_engine.launch.restarts import Restarts, going_on
from megatron_run_engine.launch.saved import how_to_go_on, interrupted, last_line, last_saved
from megatron_run_engine.launch.threads import quiet_torch
from megatron_run_engine.launch.worlds import How, find_world
from megatron_run_engine.runtime.world import World

if TYPE_CHECKING:
    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.run_folder import OpenedFolder


@dataclass(frozen=True)
class Terms:
    """How a run is started, apart from what is trained.

    ``arguments`` are remembered in the run folder; ``quiet`` shows nothing of rank 0; ``debug`` keeps tracebacks of
    known errors too; ``tell`` shows a line of ours to the user. Local ranks are started again at most ``max_restarts``
    times.
    """

    arguments: Sequence[str] = ()
    quiet: bool = False
    debug: bool = False
    max_restarts: int = 0
    tell: Callable[[str], None] = print


class FailedRunError(RunError):
    """Ranks that were started failed; ``ending`` says how, and where the run folder is."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending.message or f"the run ended with exit code {int(ending.code)}")
        self.exit_code = ending.code
        self.ending = ending


def launch(request: Request, terms: Terms, how: How = "auto") -> Ending:
    """Train what ``request`` asks for, and say how it ended.

    ``auto`` joins the world that torchrun or Slurm made, else starts the local ranks. Raises :class:`RunError` for
    what is found before a rank starts; a failure of a rank is in the result.
    """
    world = find_world(os.environ, how)
    if world is not None:
        quiet_torch(os.environ)
    from megatron_run.planning import resolve

    if world is not None and terms.max_restarts:
        raise InputError(
            f"--max-restarts {terms.max_restarts} in a world of {world.launcher}",
            why="only who started the ranks can start them again",
            fix=_RESTARTING[world.launcher],
        )
    if world is None:
        return _start_local(_splitting(resolve(request)), request, terms)
    if request.nproc not in (None, world.size):
        raise InputError(
            f"--nproc {request.nproc} in a world of {world.size} ranks",
            why=f"{world.launcher} has started {world.size}",
            fix="leave --nproc out",
        )
    return _join(lambda: _splitting(resolve(replace(request, nproc=world.size))), world, terms)


def train(run: ResolvedRun, *, resume: str | int = "auto", allow_plugin_change: Sequence[str] = ()) -> Ending:
    """Train ``run`` from Python: in this process when it is a world of one, else on local ranks.

    ``resume`` says what of the run folder to go on from: the newest saved step (``auto``), one by its number, or none
    (``never``). ``allow_plugin_change`` names kinds whose saved state may be dropped (``optimizer``, ``scaler``).

    In a program that torchrun or srun has started, this process is one rank of its world. Raises what training raises
    in this process, and :class:`FailedRunError` for ranks elsewhere.
    """
    request = replace(run.request, resume=str(resume), allow_plugin_change=tuple(allow_plugin_change))
    run = replace(run, request=request)
    world = find_world(os.environ)
    if world is not None:
        ending = _join(lambda: _splitting(_fitting(run, world)), world, Terms())
    elif run.sizes.world == 1:
        return _train_here(_splitting(run))
    else:
        ending = _start_local(_splitting(run), _as_request(run), Terms())
    if ending.code == ExitCode.SIGINT:
        raise KeyboardInterrupt
    if ending.code:
        raise FailedRunError(ending)
    return ending


def _fitting(run: ResolvedRun, world: World) -> ResolvedRun:
    if run.sizes.world != world.size:
        raise InputError(
            f"a run of {run.sizes.world} ranks in a world of {world.size}",
            why=f"{world.launcher} has started {world.size}",
            fix=f"resolve it with nproc={world.size}",
        )
    return run


def _splitting(run: ResolvedRun) -> ResolvedRun:
    """``run``, once its layers are known to split over its ranks, and the weights that it starts from to be there.

    A refusal comes before anything is written.

    Only the layers know what they divide, and what of them can be captured, so they are made, without memory. Those
    that do not serve ``parallel.tensor`` divide nothing. What fails otherwise is left to the ranks.
    """
    from megatron_run_engine.training.state.init_from import check_source

    check_source(run)
    divides = any("parallel.tensor" in plugin.provides for plugin in chain.from_iterable(run.plugins.values()))
    if divides or run.one("graph-capture").name != "none":
        from megatron_run_engine.training.memory_estimate import model_size

        try:
            model_size(run)
        except RunError:
            raise
        except Exception as unknown:  # a model that needs its device to be built
            logging.getLogger("megatron_run").debug("the layers were not made in advance", exc_info=unknown)
    return run


def _as_request(run: ResolvedRun) -> Request:
    """What another process needs to resolve ``run`` again. Objects of this process cannot be handed over."""
    from megatron_run.planning import to_yaml

    handed_in = [str(plugin) for many in run.plugins.values() for plugin in many if plugin.origin == "python"]
    if handed_in:
        raise InputError(
            f"a run of {run.sizes.world} ranks cannot use {', '.join(handed_in)}",
            why="the ranks are processes of their own, and cannot see an object of this one",
            fix="write the plugin into a file and name the file, as in schedule=./mine.py, or start with torchrun",
        )
    asked = run.request
    return Request(
        configs=("-",),
        stdin=to_yaml(run),
        nproc=run.sizes.world,
        resume=asked.resume,
        allow_plugin_change=asked.allow_plugin_change,
    )


def _train_here(run: ResolvedRun) -> Ending:
    """Train in this process, which is somebody's program or notebook: what training sets in it is given back."""
    from megatron_run_engine.launch.process import assign_device, borrowed_process

    world = assign_device(run, World())
    with borrowed_process(run, world):
        return _train_in_own_folder(run, world)


def _train_in_own_folder(run: ResolvedRun, world: World) -> Ending:
    from megatron_run_engine.launch.failure import exit_code
    from megatron_run_engine.launch.member import train_in_folder
    from megatron_run_engine.run_folder import open_run_folder

    opened = open_run_folder(run, sys.argv)
    with opened.lock:
        if opened.finished:
            return _already_finished(opened, print)
        try:
            code = train_in_folder(run, world, opened.folder)
        except BaseException as error:
            opened.folder.end(exit_code(error), last_line(error, opened.folder.path))
            raise
        opened.folder.end(code)
    return Ending(code, opened.folder.path)


#: How others start ranks again.
_RESTARTING = {
    "torchrun": "write torchrun --max-restarts N before -m megatron_run_cli",
    "slurm": "submit the job with --requeue",
}


def _start_local(run: ResolvedRun, request: Request, terms: Terms) -> Ending:
    """Start the ranks, and start them again as often as ``terms`` allow and it makes sense."""
    from megatron_run_engine.launch.process import check_local_devices

    check_local_devices(run)
    for notice in run.notices:
        terms.tell(notice)
    restarts, current = Restarts(terms.max_restarts), (run, request)
    ending = _attempt(*current, terms)
    while ending.folder is not None and (line := restarts.next(ending)) is not None:
        terms.tell(line)
        current = going_on(*current, ending.folder)
        ending = _attempt(*current, terms)
    _tell_how_to_go_on(ending, terms.tell)
    return ending


def _attempt(run: ResolvedRun, request: Request, terms: Terms) -> Ending:
    """One attempt in the run folder, from its opening to its end."""
    from megatron_run_engine.launch.local import LocalPlan, run_local
    from megatron_run_engine.launch.relay import terminal_writer
    from megatron_run_engine.launch.threads import threads_per_rank
    from megatron_run_engine.run_folder import open_run_folder

    opened = open_run_folder(run, terms.arguments)
    with opened.lock:
        if opened.finished:
            return _already_finished(opened, terms.tell)
        size = run.sizes.world
        plan = LocalPlan(
            request=request,
            folder=opened.folder,
            size=size,
            threads=threads_per_rank(run.config.run.threads, size),
            environment=os.environ,
            show=None if terms.quiet else terminal_writer(),
            shown_environment={} if terms.quiet else _terminal(),
            tell=terms.tell,
            debug=terms.debug,
            timeout=run.config.run.timeout,
        )
        try:
            ending = _saying_what_is_saved(run_local(plan))
        except BaseException as error:
            opened.folder.end(ExitCode.BUG, repr(error))
            raise
        opened.folder.end(ending.code, ending.message)
    return ending


def _saying_what_is_saved(ending: Ending) -> Ending:
    if ending.code != ExitCode.SIGINT:
        return ending
    return replace(ending, message=interrupted(ending.message, ending.folder))


def _tell_how_to_go_on(ending: Ending, tell: Callable[[str], None]) -> None:
    """Where another start would go on from what was saved, say so."""
    if ending.folder is not None and ending.code.retry and (step := last_saved(ending.folder)) is not None:
        tell(f"step {step} is saved: {how_to_go_on(ending.folder)}")


def _already_finished(opened: OpenedFolder, tell: Callable[[str], None]) -> Ending:
    path = opened.folder.path
    tell(f"run folder {path} is finished: nothing to do")
    return Ending(ExitCode.DONE, path)


def _terminal() -> dict[str, str]:
    """What rank 0 must know to draw for our terminal, though it writes to a file."""
    if not sys.stdout.isatty():
        return {}
    size = shutil.get_terminal_size()
    return {"FORCE_COLOR": "1", "COLUMNS": str(size.columns), "LINES": str(size.lines)}


def _join(resolve_run: Callable[[], ResolvedRun], world: World, terms: Terms) -> Ending:
    """This process is a rank of somebody's world: run it, and speak for it when it is the first cause."""
    from megatron_run_engine.launch.member import Member

    with _kept_descriptors(1, 2):
        member = Member(resolve_run, world, terms.tell, arguments=terms.arguments, quiet=terms.quiet, debug=terms.debug)
        end = member.run()
    folder = member.folder
    knows = world.rank == 0 or not end.secondary or end.lost is not None
    message = end.message if knows and end.speaker in (None, world.rank) else ""
    if message and folder is not None and world.rank > 0:
        first, newline, others = message.partition("\n")
        message = f"{first} (rank {world.rank}, log: {folder.log(world.rank)}){newline}{others}"
    return Ending(end.code, folder.path if folder else None, message)


@contextmanager
def _kept_descriptors(*descriptors: int) -> Iterator[None]:
    """Descriptors that the block may turn elsewhere are afterwards what they were."""
    copies = [os.dup(descriptor) for descriptor in descriptors]
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for copy, descriptor in zip(copies, descriptors, strict=True):
            os.dup2(copy, descriptor)
            os.close(copy)
