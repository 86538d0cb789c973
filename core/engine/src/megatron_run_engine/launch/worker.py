"""One rank of a run, whoever started its process: from the words that were typed to the exit code, top to bottom."""

from __future__ import annotations

import os
import traceback
from _thread import interrupt_main
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_run.contracts.activity import Activity
from megatron_run.errors import CheckpointError, ExitCode, RankLostError
from megatron_run.planning.run import comparison_table
from megatron_run_engine.host.process import assign_device, gpu_name, set_threads, start_device
from megatron_run_engine.launch.attempts import on_ranks
from megatron_run_engine.launch.failures import classify, exit_code, last_line
from megatron_run_engine.launch.job import LaunchOptions, RankResult
from megatron_run_engine.launch.preemption import Leave, preempted
from megatron_run_engine.launch.rank_output import append_line, flush_output, redirect_output, shown_log
from megatron_run_engine.launch.rendezvous import (
    PeerError,
    Rendezvous,
    ResolveRun,
    agree_on_run,
    attempt,
    check_digests,
    check_gpus,
)
from megatron_run_engine.launch.signals import stopping_on_signals
from megatron_run_engine.launch.watchdog.page import PageWriter
from megatron_run_engine.launch.watchdog.sidecar_client import SidecarClient
from megatron_run_engine.run_folder import (
    OpenedFolder,
    RunFolder,
    join_run_folder,
    open_run_folder,
    recording_refusals,
)
from megatron_run_engine.run_folder.excluded import NAME, Excluded, read_excluded, remaining
from megatron_run_engine.run_folder.restart_times import write_reported
from megatron_run_engine.runtime.comm import patience
from megatron_run_engine.runtime.world import StopRequest, World
from megatron_run_engine.training.trainer import train_rank

if TYPE_CHECKING:
    from collections.abc import Mapping

    from megatron_run.planning import ResolvedRun

#: Seconds to wait for the others when this rank could not read run.timeout.
_DEFAULT_TIMEOUT = 600.0
#: What a rank does once its process group exists.
Work = Callable[["ResolvedRun", World, Activity], None]


class RankWorker:
    """A rank at work.

    ``resolve_run`` makes the run, the same on every rank, or raises what is wrong with it. ``folder`` is given when
    our launcher has opened it (and will close it); else rank 0 opens one and the others join it. ``page`` is where our
    launcher reads the status page of this rank. ``work`` is what it does, by default a training.
    """

    def __init__(
        self,
        resolve_run: ResolveRun,
        world: World,
        options: LaunchOptions,
        *,
        folder: RunFolder | None = None,
        page: Path | None = None,
        work: Work | None = None,
    ) -> None:
        self.folder, self._work = folder, work
        self._resolve_run, self._world, self._options, self._page = resolve_run, world, options, page
        self._opened: OpenedFolder | None = None
        self._rendezvous: Rendezvous | None = None
        self._sidecar: SidecarClient | None = None
        self._stop: StopRequest | None = None
        self._trains, self._spares = True, False  # whether this rank trains, and whether others stand by
        self._early: list[str] = []  # lines shown before rank 0 had its log
        self._shown = ExitStack()
        self._terminal = os.dup(2)  # the output of most ranks goes to their log, but one line must reach the user

    def run(self) -> RankResult:
        """Train, or do the task. Nothing is raised: there is an exit code, and a message if this rank must print it."""
        joined = self._world.launcher != "local"
        try:
            result = RankResult(self._world.rank, self._train())
            if self._stop is not None and self._stop.notice and not joined:  # our launcher knows of signals alone
                result = replace(result, message=f"stopped by {self._stop.notice}")
            with suppress(RuntimeError, ValueError):  # a peer that is gone does not matter any more
                if dist.is_initialized():
                    dist.destroy_process_group()
        except BaseException as error:
            result = self._failure(error)
        rank = self._world.rank
        if self._sidecar is not None:
            self._sidecar.close(result.code)  # first of all: from here on a pause is no hang
        speaker = rank
        if self._rendezvous is not None:
            if self._spares and self._trains and (rank == 0 or result.failed):
                self._rendezvous.release_spares(result.code)
            if result.message and joined:  # our launcher reads the results of all ranks, and chooses the first cause
                with stopping_on_signals(StopRequest()):  # torchrun sends SIGTERM to the others once one has exited
                    speaker, message = self._rendezvous.find_cause(result.message, result.lost)
                result = replace(result, message=message)
            self._rendezvous.leave()
        self._let_go(result)
        ignorant = rank > 0 and result.secondary and result.lost is None  # the rank that knows prints a better line
        if joined and (speaker != rank or ignorant):
            return replace(result, message="")
        if joined and result.message and self.folder is not None:
            append_line(self.folder.log(rank), f"megatron-run: {result.message}")  # the caller shows it
        return result

    def _let_go(self, result: RankResult) -> None:
        """Say in the run folder how it ended, and close what is open.

        Once the lock is released another attempt may open the folder, and must find how this one ended.
        """
        if self._opened is not None:
            if not self._opened.finished:
                with suppress(OSError, CheckpointError):  # a full disk or a moved folder must not change the exit code
                    self._opened.end(result.code, result.message, keep=self._options.debug)
            self._opened.lock.release()
        self._shown.close()
        if self._sidecar is not None:
            self._sidecar.join()
        os.close(self._terminal)

    def _train(self) -> ExitCode:
        """The start of a rank, phase by phase: the ranks agree on the outcome of each, so that all fail together."""
        resolved = attempt(lambda: self._resolve_run(self._known_latest(), self._decide))
        timeout = resolved.values[0].config.run.timeout if resolved.values else _DEFAULT_TIMEOUT
        self._rendezvous = rendezvous = self._rendezvous or Rendezvous(self._world, timeout)
        rendezvous.timeout = timeout
        run = agree_on_run(rendezvous, self._resolve_run, resolved)
        joined = self._world.launcher != "local"  # else the launcher has opened the folder
        with recording_refusals(run.config.run.folder if joined and self._world.rank == 0 else None):
            run = self._without_excluded(rendezvous, run)
            world = self._place(rendezvous, run)
            if self.folder is None:
                if world.rank == 0:
                    for notice in run.notices:
                        self._options.tell(notice)
                        self._early.append(f"megatron-run: {notice}")
                self.folder = self._find_folder(rendezvous, run)
        if self.folder is None:
            return ExitCode.DONE
        set_threads(run, world)
        activity = Activity()
        self._start_watch(rendezvous, world, self.folder, activity, timeout)
        self._trains, self._spares = world.rank < run.sizes.world, world.size > run.sizes.world
        if not self._trains:
            return self._stand_by(rendezvous, run, activity)
        world = world.first(run.sizes.world)
        if world.size > 1:
            dist.init_process_group(
                backend=world.backend,
                store=rendezvous.group_store,
                rank=world.rank,
                world_size=world.size,
                timeout=timedelta(seconds=patience(timeout)),
                device_id=torch.device(world.device) if world.backend == "nccl" else None,
            )
        if self._work is None:
            self._stop = stop_request(run)
            return train_in_folder(run, world, self.folder, self._stop, activity, self._leave)
        self._work(run, world, activity)
        return ExitCode.DONE

    def _leave(self, code: ExitCode, line: str) -> None:
        """End this process now, as its time is over: what it was doing is left undone. Called by another thread."""
        with suppress(OSError, ValueError):  # whoever read the output may be gone first
            print(f"megatron-run: {line}", flush=True)  # noqa: T201  # of rank 0 it is shown
        if self._sidecar is not None:
            self._sidecar.close(code)
        if self._rendezvous is not None and self._spares:
            self._rendezvous.release_spares(code)
        with suppress(OSError, CheckpointError):
            if self._opened is not None:
                self._opened.end(code, line, keep=True)
            flush_output()
        os._exit(code)

    def _start_watch(
        self, rendezvous: Rendezvous, world: World, folder: RunFolder, activity: Activity, timeout: float
    ) -> None:
        """Show ``activity`` to the watchdog, before the process group: a rank that hangs while it is made is named."""
        if self._page is not None:
            PageWriter(self._page, activity, ahead=world.device != "cpu")
        elif world.launcher != "local":
            self._sidecar = sidecar = SidecarClient(world, folder, timeout, self._terminal)
            rendezvous.agree("watchdog", attempt(lambda: sidecar.start_hub() if world.rank == 0 else None))
            rendezvous.agree("sidecar", attempt(lambda: sidecar.start(activity)))
            if world.rank == 0:
                sidecar.forget_secret()

    def _stand_by(self, rendezvous: Rendezvous, run: ResolvedRun, activity: Activity) -> ExitCode:
        """Wait as a spare until the ranks that train have ended, as they end. A signal is theirs to answer."""
        out = self._world.rank >= self._world.size - self._world.left_out
        why = f"local rank {self._world.local_rank} is left out" if out else "a spare"
        print(f"{why}: ranks 0 to {run.sizes.world - 1} train", flush=True)  # noqa: T201  # into its log
        with stopping_on_signals(StopRequest()):
            return rendezvous.stand_by(activity.heartbeat)

    def _known_latest(self) -> Mapping[str, str]:
        """Return what ``runs/latest`` stood for to the first start: by now it may name this very run."""
        return self._met_early().remembered() if self._world.restart else {}

    def _decide(self, work: Callable[[], Mapping[str, str]]) -> Mapping[str, str]:
        return self._met_early().decide(work)

    def _met_early(self) -> Rendezvous:
        """The rendezvous, before this rank knows run.timeout."""
        self._rendezvous = self._rendezvous or Rendezvous(self._world, _DEFAULT_TIMEOUT)
        return self._rendezvous

    def _without_excluded(self, rendezvous: Rendezvous, run: ResolvedRun) -> ResolvedRun:
        """``run`` on the ranks that its folder does not exclude; the others get the last numbers, and will stand by.

        Rank 0 reads the record, which other hosts may see later. Our own launcher does not start such ranks.
        """
        folder, world = run.config.run.folder, self._world
        if world.launcher == "local" or folder is None or run.config.run.elastic == "off":
            return run
        here = {"host": world.host, "place": world.local_rank}
        notes = rendezvous.agree("places", attempt(lambda: here), lambda place: place).notes

        def choose() -> dict[str, Any]:
            places = [Excluded(note["host"], note["place"]) for note in notes]
            left = remaining(read_excluded(folder.expanduser().absolute()), places) if places else ()
            return {"left": left, "out": [place.named for rank, place in enumerate(places) if rank not in left]}

        chosen = rendezvous.agree("excluded", attempt(choose), lambda lists: lists).first
        left, named = chosen["left"], chosen["out"]
        out = [rank for rank in range(world.size) if rank not in left]
        if not out:
            return run
        self._world = replace(world, rank=[*left, *out].index(world.rank), left_out=len(out))
        rendezvous.renumber(self._world)

        def decide(work: Callable[[], Mapping[str, str]]) -> Mapping[str, str]:
            return rendezvous.decide(work, "decided again")

        fewer = rendezvous.agree("fewer", attempt(lambda: on_ranks(run, len(left), decide))).value
        line = f"{NAME} in the run folder leaves out {' and '.join(named)}, until it is taken out there"
        return replace(fewer, notices=(line, *fewer.notices))

    def _place(self, rendezvous: Rendezvous, run: ResolvedRun) -> World:
        """This rank's world with its device, once all ranks are known to run the same; NCCL wants a GPU for each."""

        def place() -> World:
            placed = assign_device(run, self._world, self._print)
            if placed.rank < run.sizes.world:  # a spare needs none, and that of one that is left out may be at fault
                start_device(run, placed.device)
            return placed

        def note(placed: World) -> dict[str, Any]:
            kept = rendezvous.keep({**comparison_table(run), "device": placed.device.partition(":")[0]})
            gpu = gpu_name(placed.device) if placed.backend == "nccl" and placed.rank < run.sizes.world else ""
            return {"host": placed.host, "gpu": gpu, "digest": kept}

        def compare() -> None:
            check_digests(placed.notes, rendezvous.recall)
            check_gpus(placed.notes)

        placed = rendezvous.agree("device", attempt(place), note)
        rendezvous.agree("compare", attempt(compare))  # rank 0 alone has the notes: the others compare none
        return placed.value

    def _print(self, line: str) -> None:
        """Print a line before the log is open, which will begin with it."""
        print(line, flush=True)  # noqa: T201  # standard output of rank 0 is what the terminal shows
        self._early.append(line)

    def _find_folder(self, rendezvous: Rendezvous, run: ResolvedRun) -> RunFolder | None:
        """Rank 0 opens the run folder and the others find it; None when it is finished."""
        rank = self._world.rank

        def ticket(opened: OpenedFolder | None) -> dict[str, Any]:
            if opened is None:
                return {}
            folder = opened.folder
            keys = {"path": str(folder.path), "attempt": folder.attempt, "id": opened.run_id}
            return {**keys, "finished": opened.finished}

        opening = attempt(lambda: self._open_folder(run) if rank == 0 else None)
        self._opened = opening.values[0] if opening.values else None
        found = rendezvous.agree("open", opening, ticket).first
        if found["finished"]:
            if rank == 0:
                self._options.tell(f"run folder {found['path']} is finished: nothing to do")
            return None
        joining = attempt(lambda: join_run_folder(Path(found["path"]), found["attempt"], found["id"], rank))
        folder = rendezvous.agree("join", joining).value
        if rank > 0 or self._options.quiet:
            redirect_output(folder.log(rank))
        else:
            self._shown.enter_context(shown_log(folder.log(rank), self._early))
        return folder

    def _open_folder(self, run: ResolvedRun) -> OpenedFolder:
        """Open the run folder. A restart by torchrun, of which no launcher of ours knows, begins its record here."""
        opened = open_run_folder(run, self._options.arguments)
        last = opened.last
        if self._world.restart and last is not None and last.exit_code == ExitCode.RANK_LOST and not opened.finished:
            write_reported(opened.folder, last.heartbeat)
        return opened

    def _failure(self, error: BaseException) -> RankResult:
        """The result of a rank that raised ``error``. A bug prints its traceback, with ``--debug`` every error does."""
        code, known = exit_code(error), classify(error)
        reported_by_peer = isinstance(error, PeerError)
        if self._options.debug or (code == ExitCode.BUG and not reported_by_peer):
            traceback.print_exception(error)
        message = "" if reported_by_peer else last_line(error, None if self.folder is None else self.folder.path)
        lost = known.rank if isinstance(known, RankLostError) else None
        secondary = reported_by_peer or isinstance(known, RankLostError)
        return RankResult(self._world.rank, code, message, secondary, lost)


def _say(line: str) -> None:
    print(f"megatron-run: {line}", flush=True)  # noqa: T201  # beside what the observers print


def _interrupt(_code: ExitCode, line: str) -> None:
    """Raise KeyboardInterrupt in the main thread of somebody's program, which must end in time."""
    _say(line)
    interrupt_main()


def stop_request(run: ResolvedRun) -> StopRequest:
    """The limits of ``run``, from now on."""
    limit, within = run.config.run.time_limit, run.config.run.stop_within
    return StopRequest(limit.seconds if limit else inf, within.seconds if within else inf)


def train_in_folder(
    run: ResolvedRun,
    world: World,
    folder: RunFolder,
    stop: StopRequest,
    activity: Activity | None = None,
    leave: Leave = _interrupt,
) -> ExitCode:
    """Train until ``stop``, with signals attended to; the last step done is on disk afterwards, whatever happens.

    ``activity`` records what this rank does, for the watchdog and for injected faults. ``leave`` ends this process
    where ``run.stop_within`` is over first.
    """
    asked = run.config.run
    # One rank of a host looks for all. Local ranks all do: they are few, and none is told to end by another's end; and
    # so do all where the first of a host may be left out.
    looks = world.local_rank == 0 or world.launcher == "local" or world.left_out
    notice = asked.stop_file if looks else None
    tells = world.rank == 0 and world.launcher != "local"  # our launcher answers for its ranks
    with (
        stopping_on_signals(stop, tells=tells, borrowed=world.launcher == "python"),
        preempted(stop, notice, folder.path, leave, _say if world.rank == 0 else lambda _: None),
    ):
        try:
            with folder.in_use():
                code = train_rank(run, world, folder, stop, activity)
            if tells and code is not ExitCode.DONE:
                print(f"stopped by {stop.stopped_by(code)}", flush=True)  # noqa: T201  # beside what the observers print
            return code
        finally:
            with suppress(OSError):
                folder.flush()
