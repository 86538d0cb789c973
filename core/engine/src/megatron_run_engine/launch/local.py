"""The local launcher: starts the ranks of one host, waits for them, and leaves no process behind.

Every rank is a process group of its own, so that Ctrl-C at the terminal reaches only this launcher, and holds the read
end of a pipe (its lifeline) whose write end only the launcher has: when the launcher dies, however it dies, the rank
reads end-of-file and ends too.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from math import inf
from pathlib import Path

from megatron_run.errors import ExitCode, RankLostError
from megatron_run_engine.host.rank_environment import available_cores, rank_environment
from megatron_run_engine.launch.failures import describe, first_cause
from megatron_run_engine.launch.job import Job, Lost, RankResult, RunResult, has_reported, page_path
from megatron_run_engine.launch.rank_output import Relay, count_warnings, last_log_line
from megatron_run_engine.launch.signals import AFTER_THE_STEP, SAVING, STARTING, caught_signals
from megatron_run_engine.launch.start import (
    RANK_PROGRAM,
    RankProcess,
    Servers,
    forked_ranks,
    scratch_folder,
    spawned_ranks,
    starting,
)
from megatron_run_engine.launch.watchdog.monitor import Watchdog
from megatron_run_engine.launch.watchdog.page import Page
from megatron_run_engine.launch.watchdog.verdict import IN_ORDER
from megatron_run_engine.run_folder import open_log

#: Seconds that the other ranks get to end by themselves once one has failed: all are gone within 5.
GRACE = 4.0
_POLL = 0.02


def run_local(
    job: Job,
    tell: Callable[[str], None],
    show: Callable[[bytes], None] | None,
    *,
    servers: Servers | None = None,
    program: Sequence[str] = RANK_PROGRAM,
    environment: Mapping[str, str] | None = None,
    grace: float = GRACE,
) -> RunResult:
    """Start the ranks, wait for them all, and return how the run ended. Signals are forwarded meanwhile.

    ``tell`` gets the launcher's own lines, and ``show`` what rank 0 prints, None for silence. ``servers`` of an attempt
    before fork the ranks; ranks that are not forked run ``program``. Their environment is made from ``environment``, by
    default this process's.
    """
    with ExitStack() as cleanup:
        signals = cleanup.enter_context(caught_signals(*AFTER_THE_STEP))  # until the scratch folder is gone
        with starting():
            scratch = cleanup.enter_context(scratch_folder())
            relay = Relay(job.log(0), show, tell, bars=job.task is None) if show is not None else None
            tell = tell if relay is None else relay.tell
            servers = cleanup.enter_context(Servers()) if servers is None else servers
            ranks = _Ranks(replace(job, lifeline=servers.lifeline), scratch, tell, grace)
            environment = os.environ if environment is None else environment
            cleanup.enter_context(ranks.started(servers, program, environment))
            if relay is not None:
                relay.start()  # after the last start of a rank: forked ones would miss this thread
                cleanup.callback(relay.finish)
        ranks.wait(signals)
        if relay is not None:
            relay.finish()
        return _run_result(job, ranks, signals, tell)


class _Ranks:
    """The processes of the ranks and what became of them."""

    def __init__(self, job: Job, scratch: Path, tell: Callable[[str], None], grace: float) -> None:
        self._job, self._tell, self._grace = job, tell, grace
        self._path = scratch / "job.json"
        self._processes: Sequence[RankProcess] = ()
        self._watchdog = Watchdog([page_path(self._path, rank) for rank in range(job.size)], job.timeout)
        self._order: dict[int, int] = {}  # rank -> how many had ended before it
        self._killed: set[int] = set()
        self._deserted: set[int] = set()
        self.verdict: RankLostError | None = None
        self.lost: Lost | None = None

    @contextmanager
    def started(self, servers: Servers, program: Sequence[str], environment: Mapping[str, str]) -> Iterator[None]:
        """Start every rank, and leave none behind. Descriptors 1 and 2 of a rank are its log."""
        job = replace(self._job, init_method=f"file://{self._path.with_name('rendezvous')}")
        job.write(self._path)
        common = rank_environment(environment, job.threads, job.size, available_cores())
        for rank in range(job.size):  # the relay opens a log at once, and a rank that never came has an empty one
            os.close(open_log(job.log(rank)))
        starting_ranks = (
            forked_ranks(servers, self._path, job, common)
            if job.fork
            else spawned_ranks(program, self._path, job, common)
        )
        with starting_ranks as self._processes:
            try:
                yield
            finally:
                self.kill()

    def wait(self, signals: Sequence[int]) -> None:
        """Return once every rank has ended, by itself or killed.

        A first signal is forwarded, and ranks get as long as their step takes. A second one kills them. A rank that
        fails leaves the others ``grace`` seconds.
        """
        deadline, forwarded = inf, 0
        while self._poll():
            if len(signals) > forwarded:
                number, forwarded = signals[forwarded], forwarded + 1
                if forwarded == 1:
                    if number == signal.SIGINT and self._job.task is None:  # a task ends at once, and saves nothing
                        self._tell(SAVING if self.begun else STARTING)
                    for process in self._running():
                        process.send_signal(number)
                else:
                    deadline = time.monotonic()
            # With a deadline the watchdog is not asked: ranks that wait for a failed one would look as if they hung.
            elif deadline == inf and self._has_lost_one():
                deadline = time.monotonic() + self._grace
            if time.monotonic() >= deadline:
                self.kill()
            time.sleep(_POLL)
        lost = self.lost or self._failure()  # all may have ended between two looks
        if lost is not None:
            self.lost = lost._replace(ended=time.time())

    def _has_lost_one(self) -> bool:
        """Whether a rank has failed; one that hangs is named by the watchdog, and all are killed."""
        if (lost := self._failure()) is not None:
            self.lost = lost
            return True
        self.verdict = self._watchdog.look(ended=self._order)
        if self.verdict is not None:
            self.lost = Lost(time.time() - self._watchdog.age, time.time())
            self.kill()
        return False

    def _failure(self) -> Lost | None:
        """The loss of the ranks that have ended as none should, seen now; None without any."""
        if not self._deserted and all(process.returncode in (None, *IN_ORDER) for process in self._processes):
            return None
        return Lost(min(map(_end_of, self._processes)), time.time())

    def _poll(self) -> bool:
        """Note which ranks have ended, and kill what they left running; whether any rank still runs."""
        for rank, process in enumerate(self._processes):
            if rank not in self._order and process.poll() is not None:
                self._order[rank] = len(self._order)
                process.kill_group()
                if process.returncode == 0 and self._watchdog.page(rank) and not has_reported(self._path, rank):
                    self._deserted.add(rank)
        return bool(self._running())

    def _running(self) -> list[RankProcess]:
        return [process for process in self._processes if process.returncode is None]

    def kill(self) -> None:
        """Kill what still runs, with its children. Idempotent."""
        for rank, process in enumerate(self._processes):
            if process.poll() is None:
                self._killed.add(rank)
                process.kill_group()
                process.wait()

    def results(self) -> list[RankResult]:
        """How each rank ended, by rank."""
        pages = self._pages()
        return [
            replace(
                RankResult.read(self._path, rank, process.wait()),
                order=self._order.get(rank, len(self._order)),
                killed=rank in self._killed,
                deserted=rank in self._deserted,
                log=self._job.log(rank),
                place=page.place if page is not None else "",
            )
            for rank, (process, page) in enumerate(zip(self._processes, pages, strict=True))
        ]

    @property
    def steps(self) -> int:
        """The most steps that any rank has done."""
        return max((page.done for page in self._pages() if page is not None), default=0)

    @property
    def begun(self) -> int:
        """The last step that any rank has begun; 0 before the first."""
        return max((page.step for page in self._pages() if page is not None), default=0)

    def _pages(self) -> list[Page | None]:
        return [self._watchdog.page(rank) for rank in range(len(self._processes))]


def _end_of(process: RankProcess) -> float:
    """When ``process`` ended, in seconds since the epoch, as far as its parent has seen; now otherwise."""
    return getattr(process, "ended", None) or time.time()


def _run_result(job: Job, ranks: _Ranks, signals: Sequence[int], tell: Callable[[str], None]) -> RunResult:
    """How the run ended: by the watchdog's verdict, well, by a signal, or by the rank that failed first."""
    results = ranks.results()
    cause = first_cause(results)
    _tell_warnings(results, tell)

    failed = ranks.verdict if ranks.verdict is not None else cause

    def ended(code: ExitCode, message: str = "") -> RunResult:
        rank = None if failed is None else failed.rank
        return RunResult(code, job.folder, message, ranks.steps, rank, ranks.lost, ranks.begun)

    if ranks.verdict is not None:
        log = job.log(ranks.verdict.rank or 0)
        return ended(ranks.verdict.exit_code, f"{ranks.verdict} (log: {log})")
    if cause is None:
        return ended(ExitCode.DONE)
    if signals:  # before any rank's own report: a rank that a signal stops takes its peers' collectives down with it
        first = signal.Signals(signals[0])
        return ended(AFTER_THE_STEP[first], f"stopped by {first.name}")
    if cause.code is ExitCode.TIME_LIMIT:
        return ended(cause.code, f"stopped by {cause.code.stopped_by}")
    if cause.code in AFTER_THE_STEP.values():
        return ended(cause.code, _stopped(cause, results))
    for result in results:  # a rank does not print its message: what rank 0 prints is shown, and so is the run's line
        if result.reported:
            with suppress(OSError), os.fdopen(open_log(result.log), "a", encoding="utf-8") as log_file:
                log_file.write(f"megatron-run: {result.message}\n")
    return ended(cause.code, describe(cause, results))


def _stopped(cause: RankResult, results: Sequence[RankResult]) -> str:
    """The cause that stopped the ranks, where no signal came here: as one says, or the log of one that had to leave."""
    said = [each.message for each in results if each.code == cause.code]
    logs = (last_log_line(each.log).removeprefix("megatron-run: ") for each in results if not each.reported)
    lines = [*said, *(line for line in logs if line.startswith("stopped by"))]
    return next(filter(None, lines), f"rank {cause.rank} was stopped by {cause.code.name}")


def _tell_warnings(results: Sequence[RankResult], tell: Callable[[str], None]) -> None:
    """Count the warnings of the ranks that are not shown, and quote the first."""
    found = [(result, *count_warnings(result.log)) for result in results[1:]]
    total = sum(count for _, count, _ in found)
    if total:
        result, _, text = next(each for each in found if each[1])
        count = f"{total} warning{'s' if total > 1 else ''} of other ranks"
        tell(f"{count}, the first on rank {result.rank}: {text} (log: {result.log})")
