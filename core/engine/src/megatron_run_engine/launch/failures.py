"""The path of a rank's failure, from the exception to the exit code and the one line that the user sees.

1. In the rank ``RankWorker.run`` catches everything. :func:`classify` finds the documented failure behind the exception
   (None: Ctrl-C, or a bug, whose traceback is printed). A ``RankResult`` gets the code of :func:`exit_code`, the text
   of :func:`last_line`, and whom the rank blames: ``secondary``, it failed because another did, and ``lost``, which.
2. A local rank (``rank.py``) leaves that result next to its job and exits with the code; a forked one exits in
   ``fork_server.become_rank``. The launcher (``local.py``) gives the other ranks ``GRACE`` seconds to end, kills what
   is left, and reads a result for each. One that left none, killed by a signal or ended by a C library, gets one from
   its exit status, its status page and its log. So does a process that failed before it had a ``RankWorker``:
   ``rank.failed_start``, which ``fork_server.py`` calls too, chooses the code and prints into the log, of which
   :func:`describe` quotes the last line.
3. The launcher makes a ``RunResult`` in ``local._run_result``. The watchdog's verdict goes before a signal to the
   launcher; then comes the rank that :func:`first_cause` chooses, which decides by ``secondary`` and ``lost``: a time
   limit or a signal that stopped it, or else its failure, whose line :func:`describe` makes.
4. Under torchrun and Slurm nobody collects results. ``Rendezvous.find_cause`` follows ``lost`` from rank to rank to the
   one that knows the cause: it alone keeps its line. Rank 0 closes ``status.json`` in ``RankWorker.run``,
   with that line unless only another rank knows it, and each rank exits with its own code.
5. A rank that hangs or is stopped cannot report. The watchdog names it: the local launcher kills all ranks and uses the
   watchdog's line. Under torchrun and Slurm each rank's sidecar makes its rank exit with code 4, in
   ``SidecarClient._end``, where one rank prints the line and rank 0 closes ``status.json``; it kills a rank that does
   not obey, and that of rank 0 then closes ``status.json`` itself (``Sidecar._write_status``).
6. ``api.launch`` returns the ``RunResult``; that of local ranks after ``attempts`` has closed ``status.json``. The
   command (``commands/train.py`` of the command) prints its line with ``tell_error`` and exits with its code. In place
   of a result ``api.train`` and ``api.run_task`` raise ``FailedRunError``; a world of one that trains in the caller's
   process (``api._train_here``) closes ``status.json`` and raises the exception itself.

After a lost local rank ``restarts`` says when all are started again, and with how many ranks.
"""

from __future__ import annotations

import re
import signal
import traceback
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from megatron_run.errors import ExitCode, OutOfMemoryError, PluginError, RankLostError, RunError
from megatron_run.errors.machine_limits import system_limit
from megatron_run.registry.hooks import in_one_line
from megatron_run_engine.checkpoint.step_folder import CHECKPOINTS, Checkpoints
from megatron_run_engine.launch.job import RankResult, RunResult
from megatron_run_engine.launch.rank_output import last_log_line

if TYPE_CHECKING:
    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.run_folder import RunFolder

#: What gloo, NCCL and the store say when a peer is gone or silent. gloo throws plain RuntimeErrors.
_CONNECTION = re.compile(
    r"connection (closed|reset|refused|aborted)|closed by peer|broken pipe|timed? ?out|timeout"
    r"|socket (closed|is closed)|failed to (recv|send)|no response|remote (peer|process)",
    re.IGNORECASE,
)
_COMMUNICATION = re.compile(r"gloo|nccl|tcpstore|filestore|c10d|socket|store", re.IGNORECASE)
_RAISE = "let it raise an exception, or see the whole cause with --debug"
_SMALLER = "lower train.micro_batch_size or set train.recompute=full"


def classify(error: BaseException) -> RunError | None:
    """The documented failure behind ``error``, or None when it is a bug."""
    if isinstance(error, RunError):
        return error
    if isinstance(error, SystemExit):  # nothing of ours raises it
        why = in_one_line(error, where=True)
        return PluginError("a plugin ended the process", why=why, origin=_notes(error), fix=_RAISE)
    limit = system_limit(error)
    if limit is not None:
        limit.origin = _notes(error)
        limit.fix = _SMALLER if isinstance(limit, OutOfMemoryError) else limit.fix
        return limit
    if not isinstance(error, RuntimeError):
        return None
    import torch
    import torch.distributed as dist

    first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
    if isinstance(error, torch.OutOfMemoryError):
        return OutOfMemoryError("the device ran out of memory", why=first_line, origin=_notes(error), fix=_SMALLER)
    lost = _CONNECTION.search(str(error)) is not None and _COMMUNICATION.search(str(error)) is not None
    if lost or isinstance(error, (dist.DistNetworkError, dist.DistStoreError)):
        return RankLostError("another rank was lost", why=first_line, origin=_notes(error))
    return None


def exit_code(error: BaseException) -> ExitCode:
    """The code with which a process ends because of ``error``."""
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.SIGINT
    known = classify(error)
    return known.exit_code if known else ExitCode.BUG


def one_line(error: BaseException) -> str:
    """The message for the user: the text of a documented failure, else the exception and where it was raised."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    known = classify(error)
    if known is not None:
        return str(known)
    raised = traceback.TracebackException.from_exception(error)
    raised.__notes__ = None  # they would be the last line
    text = "".join(raised.format_exception_only()).strip().splitlines()[-1]
    place = [f"{frame.filename}:{frame.lineno}" for frame in raised.stack[-1:]]
    where = ", ".join(filter(None, (*place, _notes(error))))
    return f"{text} (in {where})" if where else text


def _notes(error: BaseException) -> str:
    """The notes that ``error`` got on its way up: the rank and the action that raised it."""
    return ", ".join(note.strip().partition("\n")[0] for note in getattr(error, "__notes__", ()))


def last_line(error: BaseException, folder: Path | None, typed: ResolvedRun | None = None) -> str:
    """The message for the user when ``error`` ends the run in ``folder``; ``typed`` as in :func:`how_to_resume`."""
    line = one_line(error)
    return interrupted(line, folder, typed) if isinstance(error, KeyboardInterrupt) else line


def interrupted(how: str, folder: Path | None, typed: ResolvedRun | None = None) -> str:
    """The line of a run that SIGINT ended. ``how`` is what happened, ``typed`` as in :func:`how_to_resume`."""
    step = last_saved(folder)
    if folder is None or step is None:
        return f"{how}: no step was saved"
    return f"{how}: step {step} was saved last; {how_to_resume(folder, typed)}"


def last_saved(folder: Path | None) -> int | None:
    """The newest step that the run in ``folder`` has saved; None where there is none."""
    steps = Checkpoints(folder / CHECKPOINTS).steps() if folder is not None else []
    return steps[-1] if steps else None


def in_memory(run: ResolvedRun, result: RunResult) -> int | None:
    """The newest step of ``run`` that the memory of this host holds; None unless it is newer than those on disk."""
    from megatron_run_engine.checkpoint.memory_home import newest_in_memory
    from megatron_run_engine.run_folder.folder import RunFolder

    if result.folder is None:
        return None
    found = newest_in_memory(run.config.checkpoint, RunFolder(result.folder, 1).run_id, result.folder)
    return found if found is not None and found > (last_saved(result.folder) or 0) else None


def what_is_saved(run: ResolvedRun, result: RunResult) -> str:
    """The newest step that a run which ended in ``result`` has saved, and where; empty without one."""
    step, held = last_saved(result.folder), in_memory(run, result)
    if held is None:
        return "" if step is None else f"step {step} is saved"
    on_disk = "none" if step is None else f"step {step}"
    return f"step {held} is in memory, until this machine ends, and {on_disk} on disk"


def how_to_resume(folder: Path, typed: ResolvedRun | None = None) -> str:
    """The addition to the command of a run that ended in ``folder``.

    ``typed`` is the run as its command asks for it; without it, whatever folder and step that names.
    """
    named = typed.config.run.folder if typed else None
    added = []
    if named is None or named.expanduser().absolute() != folder:
        added.append(f"--set {quote(f'run.folder={folder}')}")
    if typed is None or typed.request.resume != "auto":
        added.append("--resume auto")
    return " ".join(("to resume from it, run the same command", *(("with", *added) if added else ())))


def first_cause(results: Sequence[RankResult]) -> RankResult | None:
    """The failed rank that brought down the others, or None when all went well.

    Where every failed rank blames another, as when one hangs, prefer one that blames a rank without a report: the
    others blame ranks that ended for the same reason.
    """
    failed = [result for result in results if result.failed]
    silent = {result.rank for result in failed if not result.reported}

    def precedence(result: RankResult) -> tuple[bool, bool, bool, int, int]:
        hearsay = result.secondary and result.lost not in silent
        return result.killed, result.secondary, hearsay, result.order, result.rank

    return min(failed, key=precedence, default=None)


def describe(cause: RankResult, results: Sequence[RankResult]) -> str:
    """One line: what happened, on which rank, and its log; then the ranks that had to be killed.

    A message of several lines (several problems found at once) keeps them.
    """
    where = f"log: {cause.log}" if len(results) == 1 else f"rank {cause.rank}, log: {cause.log}"
    first, *others = _reason(cause).splitlines() or [""]
    line = f"{first} ({where})"
    killed = [str(result.rank) for result in results if result.killed]
    if killed and cause.secondary:
        suffix, were = ("s", "were") if len(killed) > 1 else ("", "was")
        line += f"; rank{suffix} {', '.join(killed)} did not end and {were} killed"
    if not cause.reported and not cause.place:  # the cause is silent: quote the first rank that missed it
        missed = [each for each in results if each.reported and each.lost == cause.rank]
        line += "".join(f"; {each.message}" for each in sorted(missed, key=lambda each: each.order)[:1])
    return "\n".join([line, *others])


def without_logs(message: str, folder: RunFolder) -> str:
    """``message`` of :func:`describe` without the names of logs in ``folder``, which are gone."""
    log = rf"log: {re.escape(str(folder.logs))}/rank-\d+\.log"
    return re.sub(rf" \({log}\)|, {log}", "", message)


def _reason(cause: RankResult) -> str:
    where = f" in {cause.place}" if cause.place else ""
    if cause.status < 0:
        known = {number.value: number.name for number in signal.Signals}
        line = f"a rank was killed by {known.get(-cause.status, f'signal {-cause.status}')}{where}"
        # Before the first step it allocates nearly all that it ever holds.
        short = cause.status == -signal.SIGKILL and cause.place.startswith("start")
        return f"{line}, as by a system without memory: --dry-run counts what a rank needs" if short else line
    if cause.deserted:
        return f"a rank ended before the training did, with exit code 0 and without a word{where}"
    if cause.reported:
        return cause.message
    line = last_log_line(cause.log)
    return f"a rank ended with exit code {cause.status}{where}" + (f": {line}" if line else "")
