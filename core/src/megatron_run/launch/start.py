"""Decides where the ranks come from, and runs them."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from megatron_run.config.request import Request
from megatron_run.errors import ExitCode, InputError
from megatron_run.launch.job import Ending
from megatron_run.launch.worlds import How, find_world
from megatron_run.world import World

if TYPE_CHECKING:
    from megatron_run.resolve import ResolvedRun
    from megatron_run.run_folder import OpenedFolder


def launch(
    request: Request,
    *,
    how: How = "auto",
    arguments: Sequence[str] = (),
    quiet: bool = False,
    debug: bool = False,
    tell: Callable[[str], None] = print,
) -> Ending:
    """Train what ``request`` asks for, and say how it ended.

    ``auto`` joins the world that torchrun or Slurm made, else starts the local ranks. ``arguments`` are remembered in
    the run folder; ``tell`` shows a line of ours to the user. Raises :class:`megatron_run.errors.RunError` for what is
    found before a rank starts; a failure of a rank is in the result.
    """
    world = find_world(os.environ, how)
    if world is None:
        return _launch_local(request, arguments, quiet=quiet, debug=debug, tell=tell)
    return _join(request, world, arguments, quiet=quiet, debug=debug, tell=tell)


def train_in_process(run: ResolvedRun, arguments: Sequence[str] = ()) -> Ending:
    """Train a world of one in this process; whatever is raised reaches the caller.

    Raises :class:`InputError` when ``run`` needs several ranks.
    """
    from megatron_run.launch.failure import exit_code, one_line
    from megatron_run.launch.member import place_on_device, set_threads, train_in_folder
    from megatron_run.run_folder import open_run_folder

    if run.sizes.world > 1:
        raise InputError(f"a run of {run.sizes.world} ranks does not fit into one process", fix="start local ranks")
    world = place_on_device(run, World())
    opened = open_run_folder(run, arguments)
    with opened.lock:
        if opened.finished:
            return _already_finished(opened, print)
        set_threads(run, world)
        try:
            code = train_in_folder(run, world, opened.folder)
        except BaseException as error:
            opened.folder.end(exit_code(error), one_line(error))
            raise
        opened.folder.end(code)
    return Ending(code, opened.folder.path)


def _launch_local(
    request: Request, arguments: Sequence[str], *, quiet: bool, debug: bool, tell: Callable[[str], None]
) -> Ending:
    from megatron_run.launch.local import LocalPlan, run_local
    from megatron_run.launch.relay import terminal_writer
    from megatron_run.launch.threads import threads_per_rank
    from megatron_run.resolve import resolve
    from megatron_run.run_folder import open_run_folder

    run = resolve(request)
    for notice in run.notices:
        tell(notice)
    opened = open_run_folder(run, arguments)
    with opened.lock:
        if opened.finished:
            return _already_finished(opened, tell)
        size = run.sizes.world
        plan = LocalPlan(
            request=request,
            folder=opened.folder,
            size=size,
            threads=threads_per_rank(run.config.run.threads, size),
            environment=os.environ,
            show=None if quiet else terminal_writer(),
            shown_environment={} if quiet else _terminal(),
            tell=tell,
            debug=debug,
        )
        try:
            ending = run_local(plan)
        except BaseException as error:
            opened.folder.end(ExitCode.BUG, repr(error))
            raise
        opened.folder.end(ending.code, ending.message)
    return ending


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


def _join(
    request: Request,
    world: World,
    arguments: Sequence[str],
    *,
    quiet: bool,
    debug: bool,
    tell: Callable[[str], None],
) -> Ending:
    """This process is a rank of somebody's world: run it, and speak for it when it is the first cause."""
    from megatron_run.launch.member import Member

    if request.nproc not in (None, world.size):
        raise InputError(
            f"--nproc {request.nproc} in a world of {world.size} ranks",
            why=f"{world.launcher} has started {world.size}",
            fix="leave --nproc out",
        )
    with _kept_descriptors(1, 2):
        member = Member(request, world, tell, arguments=arguments, quiet=quiet, debug=debug)
        end = member.run()
    folder = member.folder
    message = "" if end.secondary and world.rank > 0 else end.message
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
