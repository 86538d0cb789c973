"""From an exception to its exit code and the line to print."""

from __future__ import annotations

import re
import traceback

from megatron_run.errors import ExitCode, OutOfMemoryError, RankLostError, RunError

#: What gloo, NCCL and the store say when a peer is gone or silent. gloo throws plain RuntimeErrors.
_CONNECTION = re.compile(
    r"connection (closed|reset|refused|aborted)|closed by peer|broken pipe|timed? ?out|timeout"
    r"|socket (closed|is closed)|failed to (recv|send)|no response|remote (peer|process)",
    re.IGNORECASE,
)
_COMMUNICATION = re.compile(r"gloo|nccl|tcpstore|filestore|c10d|socket|store", re.IGNORECASE)


def classify(error: BaseException) -> RunError | None:
    """The documented failure behind ``error``, or None when it is a bug."""
    if isinstance(error, RunError):
        return error
    if isinstance(error, MemoryError):
        return OutOfMemoryError("the host ran out of memory", origin=_notes(error), fix=_SMALLER)
    if isinstance(error, RuntimeError):
        return _classify_torch(error)
    return None


_SMALLER = "lower train.micro_batch_size or set train.recompute=full"


def _classify_torch(error: RuntimeError) -> RunError | None:
    import torch
    import torch.distributed as dist

    first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in first_line:
        return OutOfMemoryError("the device ran out of memory", why=first_line, origin=_notes(error), fix=_SMALLER)
    lost = _CONNECTION.search(str(error)) is not None and _COMMUNICATION.search(str(error)) is not None
    if lost or isinstance(error, (dist.DistNetworkError, dist.DistStoreError)):
        return RankLostError("another rank was lost", why=first_line, origin=_notes(error))
    return None


def _notes(error: BaseException) -> str:
    """What was noted on ``error`` on its way up: where it was raised."""
    return ", ".join(note.strip().partition("\n")[0] for note in getattr(error, "__notes__", ()))


def exit_code(error: BaseException) -> ExitCode:
    """The code with which a process ends because of ``error``."""
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.SIGINT
    known = classify(error)
    return known.exit_code if known else ExitCode.BUG


def one_line(error: BaseException) -> str:
    """What the user is told: the teaching text of a known failure, else the exception and where it was raised."""
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
