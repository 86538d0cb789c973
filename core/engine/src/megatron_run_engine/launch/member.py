"""One rank of a run, from the words that were typed to the exit code. Reads top to bottom."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_run.contracts.activity import Activity
from megatron_run.errors import ExitCode, RankLostError
from megatron_run.planning.digest import digest
from megatron_run_engine.launch.agreement import check_digests, check_gpus
from megatron_run_engine.launch.failure import classify, exit_code
from megatron_run_engine.launch.meeting import Meeting, PeerError, attempt, close_group
from megatron_run_engine.launch.process import assign_device, gpu_name, set_threads, start_device
from megatron_run_engine.launch.saved import last_line
from megatron_run_engine.launch.signals import stopping_on_signals
from megatron_run_engine.launch.watchdog.page import PageWriter
from megatron_run_engine.launch.watched import Watched
from megatron_run_engine.run_folder import OpenedFolder, RunFolder, join_run_folder, open_run_folder
from megatron_run_engine.runtime.comm import patience
from megatron_run_engine.runtime.world import StopRequest, World
from megatron_run_engine.training.trainer import train_rank

if TYPE_CHECKING:
    from megatron_run.planning import ResolvedRun

#: Seconds to wait for the others when this rank could not read run.timeout.
_DEFAULT_TIMEOUT = 600.0


@dataclass(frozen=True)
class MemberEnd:
    """How a rank ended. ``secondary``: only because another rank had failed, ``lost`` where it is known which.

    ``message`` may be empty. ``speaker`` is the rank whose message it is, since that one knew better.
    """

    code: ExitCode
    message: str = ""
    secondary: bool = False
    lost: int | None = None
    speaker: int | None = None


class Member:
    """A rank at work.

    ``resolve_run`` makes the run, the same on every rank, or raises what is wrong with it. ``folder`` is given when
    our launcher has opened it (and will close it); else rank 0 opens one and the others join it. ``tell`` shows a
    line to the user. ``page`` is where our launcher looks up what this rank does.
    """

    def __init__(
        self,
        resolve_run: Callable[[], ResolvedRun],
        world: World,
        tell: Callable[[str], None],
        *,
        folder: RunFolder | None = None,
        page: Path | None = None,
        arguments: Sequence[str] = (),
        quiet: bool = False,
        debug: bool = False,
    ) -> None:
        self.folder = folder
        self._resolve_run, self._world, self._tell, self._page = resolve_run, world, tell, page
        self._arguments, self._quiet, self._debug = arguments, quiet, debug
        self._opened: OpenedFolder | None = None
        self._meeting: Meeting | None = None
        self._watched: Watched | None = None
        self._terminal = os.dup(2)  # whoever speaks for all does it where the user looks

    def run(self) -> MemberEnd:
        """Train. Nothing is raised: whatever happens has an exit code."""
        try:
            end = MemberEnd(self._run())
            close_group()
        except BaseException as error:
            end = self._describe(error)
        if self._watched is not None:
            self._watched.close(end.code)
        if self._meeting is not None:
            if end.message and self._world.launcher != "local":  # our launcher hears all ranks, and compares
                with stopping_on_signals(StopRequest()):  # torchrun stops the ranks as soon as one is gone
                    speaker, message = self._meeting.first_word(end.message, end.lost)
                end = replace(end, message=message, speaker=speaker)
            self._meeting.leave()
        if self._opened is not None:
            if not self._opened.finished:
                with suppress(OSError):  # a full disk must not change the exit code
                    self._opened.folder.end(end.code, end.message)
            self._opened.lock.release()
        os.close(self._terminal)
        return end

    def _run(self) -> ExitCode:
        resolved = attempt(self._resolve_run)
        timeout = resolved.values[0].config.run.timeout if resolved.values else _DEFAULT_TIMEOUT
        self._meeting = meeting = Meeting(self._world, timeout)
        run = meeting.settle("resolve", resolved).value
        placed = meeting.settle("agree", attempt(lambda: place_on_device(run, self._world)), _note_maker(run, meeting))
        meeting.settle("compare", attempt(lambda: _compare(placed.notes, meeting)))
        world = placed.value
        if self.folder is None:
            if world.rank == 0:
                for notice in run.notices:
                    self._tell(notice)
            self.folder = self._find_folder(meeting, run)
        if self.folder is None:
            return ExitCode.DONE
        set_threads(run, world)
        activity = Activity()
        self._be_watched(meeting, world, self.folder, timeout, activity)
        join_group(meeting, world, patience(timeout))
        return train_in_folder(run, world, self.folder, activity)

    def _be_watched(
        self, meeting: Meeting, world: World, folder: RunFolder, timeout: float, activity: Activity
    ) -> None:
        """Show what this rank does, to our launcher or to a watcher of its own."""
        if self._page is not None:
            PageWriter(self._page, activity, ahead=world.device != "cpu")
        if self._page is not None or world.launcher == "local":
            return
        self._watched = watched = Watched(world, folder, timeout, self._terminal)
        hub = attempt(lambda: watched.start_hub() if world.rank == 0 else {})
        watched.start(meeting.settle("watch", hub, lambda note: note).first["hub"], activity)

    def _find_folder(self, meeting: Meeting, run: ResolvedRun) -> RunFolder | None:
        """Rank 0 opens the run folder and the others find it; None when it is finished."""
        opening = attempt(lambda: open_run_folder(run, self._arguments) if self._world.rank == 0 else None)
        self._opened = opening.values[0] if opening.values else None
        ticket = meeting.settle("open", opening, _ticket).first
        if ticket["finished"]:
            if self._world.rank == 0:
                self._tell(f"run folder {ticket['path']} is finished: nothing to do")
            return None
        rank = self._world.rank
        joining = attempt(lambda: join_run_folder(Path(ticket["path"]), ticket["attempt"], ticket["id"], rank))
        folder = meeting.settle("join", joining).value
        if rank > 0 or self._quiet:
            redirect_output(folder.log(rank))
        return folder

    def _describe(self, error: BaseException) -> MemberEnd:
        code, peer = exit_code(error), isinstance(error, PeerError)
        if self._debug or (code == ExitCode.BUG and not peer):
            traceback.print_exception(error)
        known = classify(error)
        lost = known.rank if isinstance(known, RankLostError) else None
        message = "" if peer else last_line(error, None if self.folder is None else self.folder.path)
        return MemberEnd(code, message, peer or isinstance(known, RankLostError), lost)


def train_in_folder(run: ResolvedRun, world: World, folder: RunFolder, activity: Activity | None = None) -> ExitCode:
    """Train with signals attended to; the last step done is on disk afterwards, whatever happens.

    ``phases`` hears what this rank does.
    """
    limit = run.config.run.time_limit
    stop = StopRequest(limit.seconds) if limit else StopRequest()
    with stopping_on_signals(stop):
        try:
            return train_rank(run, world, folder, stop, activity)
        finally:
            with suppress(OSError):
                folder.flush()


def place_on_device(run: ResolvedRun, world: World) -> World:
    """``world`` with its device chosen and made current."""
    placed = assign_device(run, world)
    start_device(run, placed.device)
    return placed


def join_group(meeting: Meeting, world: World, timeout: float) -> None:
    """Make the default process group: NCCL between GPUs, else gloo. A world of one has none."""
    if world.size == 1:
        return
    cuda = world.device.startswith("cuda")
    dist.init_process_group(
        backend="nccl" if cuda else "gloo",
        store=meeting.store,
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=timeout),
        device_id=torch.device(world.device) if cuda else None,
    )


def redirect_output(log: Path) -> None:
    """Make ``log`` this process's descriptors 1 and 2."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _note_maker(run: ResolvedRun, meeting: Meeting) -> Callable[[World], dict[str, Any]]:
    """What a rank notes of itself, to be compared with the others."""

    def note(world: World) -> dict[str, Any]:
        kept = meeting.keep({**digest(run), "device": world.device.partition(":")[0]})
        return {"host": world.host, "gpu": gpu_name(world.device), "digest": kept}

    return note


def _compare(notes: Sequence[Mapping[str, Any]], meeting: Meeting) -> None:
    """Rank 0 has the notes and speaks for all; the others have none, and nothing to say."""
    check_digests(notes, meeting.recall)
    check_gpus(notes)


def _ticket(opened: OpenedFolder | None) -> dict[str, Any]:
    """What the other ranks need to find the folder that rank 0 opened."""
    if opened is None:
        return {}
    folder = opened.folder
    return {
        "path": str(folder.path),
        "attempt": folder.attempt,
        "id": opened.run_id,
        "finished": opened.finished,
    }
