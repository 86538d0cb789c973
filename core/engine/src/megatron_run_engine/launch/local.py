"""Starts the ranks of one host, watches over them, and leaves no process behind.

Every rank is a process group of its own, so that Ctrl-C at the terminal reaches only this launcher, and holds the read
end of a pipe (its lifeline) whose write end only the launcher has: when the launcher dies, however it dies, the rank
reads end-of-file and goes too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path

from megatron_run.config.request import Request
from megatron_run.errors import ExitCode, RankLostError
from megatron_run_engine.launch.cause import RankEnd, count_warnings, describe, first_cause
from megatron_run_engine.launch.job import Ending, Job, Report, page_path
from megatron_run_engine.launch.relay import Relay
from megatron_run_engine.launch.signals import AFTER_THE_STEP, caught_signals
from megatron_run_engine.launch.threads import available_cores, rank_environment
from megatron_run_engine.launch.watchdog.watcher import Watcher
from megatron_run_engine.run_folder import RunFolder

#: What each rank runs, with the job's path as its last argument.
RANK_PROGRAM = (sys.executable, "-m", "megatron_run_engine.launch.rank")
#: Seconds that the other ranks get to end by themselves once one has failed: all are gone within 5.
GRACE = 4.0
#: Seconds that ranks get after Ctrl-C.
INTERRUPT_GRACE = 2.0
_POLL = 0.02
#: Ends that do not trouble the other ranks: not yet, done, or stopped after a step on which all ranks agreed.
_IN_ORDER = (None, ExitCode.DONE, ExitCode.TIME_LIMIT, ExitCode.SIGINT, ExitCode.SIGTERM)


@dataclass(frozen=True)
class LocalPlan:
    """What to start: ``size`` ranks of ``program`` with ``threads`` threads each.

    ``show`` gets what rank 0 prints, None for silence, and ``shown_environment`` is for rank 0 only, so that it knows
    that it is looked at; ``tell`` gets the launcher's own lines. A rank that says nothing new for ``timeout`` seconds
    hangs, unless it waits for another.
    """

    request: Request
    folder: RunFolder
    size: int
    threads: int
    environment: Mapping[str, str]
    show: Callable[[bytes], None] | None
    tell: Callable[[str], None]
    shown_environment: Mapping[str, str] = field(default_factory=dict)
    debug: bool = False
    program: Sequence[str] = RANK_PROGRAM
    grace: float = GRACE
    timeout: float = inf


def run_local(plan: LocalPlan) -> Ending:
    """Start the ranks, wait for them all, and say how it ended. Signals are forwarded meanwhile."""
    with ExitStack() as cleanup:
        scratch = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="megatron-run-")))
        signals = cleanup.enter_context(caught_signals(signal.SIGINT, *AFTER_THE_STEP))
        ranks = _Ranks(plan, scratch)
        cleanup.callback(ranks.kill)
        ranks.start()
        relay = None
        if plan.show is not None:
            relay = Relay(plan.folder.log(0), plan.show)
            relay.start()
            cleanup.callback(relay.finish)
        ranks.wait(signals)
        if relay is not None:
            relay.finish()
        return replace(_ending(plan, ranks, signals), steps=ranks.steps)


class _Ranks:
    """The processes of the ranks and what became of them."""

    def __init__(self, plan: LocalPlan, scratch: Path) -> None:
        self._plan = plan
        self._job = scratch / "job.json"
        self._meeting = scratch / "meeting"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._watcher = Watcher([page_path(self._job, rank) for rank in range(plan.size)], plan.timeout)
        self._order: dict[int, int] = {}
        self._killed: set[int] = set()
        self._lifeline: int | None = None
        self.verdict: RankLostError | None = None

    def start(self) -> None:
        """Start every rank; its descriptors 1 and 2 are its log."""
        plan = self._plan
        read_end, self._lifeline = os.pipe()
        job = Job(plan.request, plan.folder.path, plan.folder.attempt, f"file://{self._meeting}", read_end, plan.debug)
        job.write(self._job)
        try:
            for rank in range(plan.size):
                self._processes.append(self._start(rank, read_end))
        finally:
            os.close(read_end)

    def _start(self, rank: int, lifeline: int) -> subprocess.Popen[bytes]:
        plan = self._plan
        environment = rank_environment(plan.environment, plan.threads, plan.size, available_cores())
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": plan.size, "LOCAL_WORLD_SIZE": plan.size}
        environment.update({name: str(value) for name, value in place.items()})
        if rank == 0:
            environment.update(plan.shown_environment)
        with plan.folder.log(rank).open("ab") as log:
            return subprocess.Popen(
                [*plan.program, str(self._job)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=(lifeline,),
                start_new_session=True,
            )

    def wait(self, signals: Sequence[int]) -> None:
        """Return once every rank has ended, by itself or by our hand."""
        deadline, forwarded = inf, 0
        while self._poll():
            if len(signals) > forwarded:
                forwarded += 1
                deadline = min(deadline, time.monotonic() + self._forward(signals[forwarded - 1], first=forwarded == 1))
            elif deadline == inf and any(process.returncode not in _IN_ORDER for process in self._processes):
                deadline = time.monotonic() + self._plan.grace
            elif deadline == inf:
                self._watch()
            if time.monotonic() >= deadline:
                self.kill()
            time.sleep(_POLL)

    def _watch(self) -> None:
        """End all ranks once one of them holds up the others, or itself."""
        self.verdict = self._watcher.look(ended=self._order)
        if self.verdict is not None:
            self.kill()

    def _forward(self, number: int, *, first: bool) -> float:
        """Pass a signal on; the seconds the ranks get to end: as long as their step takes, but for SIGINT."""
        if not first:
            return 0.0
        for process in self._running():
            process.send_signal(number)
        return INTERRUPT_GRACE if number == signal.SIGINT else inf

    def kill(self) -> None:
        """Kill what still runs, with all that it started. Idempotent."""
        for rank, process in enumerate(self._processes):
            if process.poll() is None:
                self._killed.add(rank)
                _kill_group(process)
                process.wait()
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    def ends(self) -> list[RankEnd]:
        """How each rank ended, by rank."""
        return [
            RankEnd(
                rank=rank,
                status=process.returncode,
                order=self._order.get(rank, len(self._order)),
                log=self._plan.folder.log(rank),
                report=Report.read(self._job, rank),
                killed=rank in self._killed,
                place=self._place(rank),
            )
            for rank, process in enumerate(self._processes)
        ]

    @property
    def steps(self) -> int:
        """The most steps that any rank has done."""
        pages = [self._watcher.page(rank) for rank in range(len(self._processes))]
        return max((page.done for page in pages if page is not None), default=0)

    def _place(self, rank: int) -> str:
        page = self._watcher.page(rank)
        return "" if page is None else page.place

    def _running(self) -> list[subprocess.Popen[bytes]]:
        return [process for process in self._processes if process.returncode is None]

    def _poll(self) -> bool:
        """Note which ranks have ended, and end what they left running; whether any rank still runs."""
        for rank, process in enumerate(self._processes):
            if rank not in self._order and process.poll() is not None:
                self._order[rank] = len(self._order)
                _kill_group(process)
        return bool(self._running())


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):  # nobody left in it (macOS: only the dead)
        os.killpg(process.pid, signal.SIGKILL)


def _ending(plan: LocalPlan, ranks: _Ranks, signals: Sequence[int]) -> Ending:
    ends, verdict = ranks.ends(), ranks.verdict
    cause = first_cause(ends)
    _tell_warnings(plan, ends)
    if verdict is not None:
        log = plan.folder.log(verdict.rank or 0)
        return Ending(verdict.exit_code, plan.folder.path, f"{verdict} (log: {log})")
    if cause is None:
        return Ending(ExitCode.DONE, plan.folder.path)
    if signals:
        first = signal.Signals(signals[0])
        return Ending(AFTER_THE_STEP.get(first, ExitCode.SIGINT), plan.folder.path, f"stopped by {first.name}")
    if cause.code in (ExitCode.SIGINT, *AFTER_THE_STEP.values()):
        return Ending(cause.code, plan.folder.path, f"rank {cause.rank} was stopped by {cause.code.name}")
    _complete_logs(ends)
    return Ending(cause.code, plan.folder.path, describe(cause, ends))


def _complete_logs(ends: Sequence[RankEnd]) -> None:
    """Add each failed rank's message to its log.

    A rank does not print it: what rank 0 prints is shown, and so is the message of the first cause.
    """
    for end in ends:
        if end.report is not None:
            with suppress(OSError), end.log.open("a", encoding="utf-8") as log:
                log.write(f"megatron-run: {end.report.message}\n")


def _tell_warnings(plan: LocalPlan, ends: Sequence[RankEnd]) -> None:
    """Count the warnings of the ranks that are not shown, and name the first once."""
    found = [(end, *count_warnings(end.log)) for end in ends[1:]]
    total = sum(count for _, count, _ in found)
    if total:
        end, _, text = next(each for each in found if each[1])
        count = f"{total} warning{'s' if total > 1 else ''} of other ranks"
        plan.tell(f"{count}, the first on rank {end.rank}: {text} (log: {end.log})")
