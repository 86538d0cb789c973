"""Limits of the machine or of the shell, as the operating system and libraries report them."""

from __future__ import annotations

import errno
import os
import re
import resource

from megatron_run.errors import InputError, OutOfMemoryError, RunError
from megatron_run.errors.wording import LONGEST_WORD

#: In torch's error where the host has no memory, and in NCCL's where InfiniBand's library gets none: other errors have
#: the system's words for it too.
_ALLOCATOR, _VERBS = "DefaultCPUAllocator", "ibv_"

#: The loader's words where a library gets no memory; the file system's, where it forbids to run what lies there, go on.
_UNMAPPED = re.compile(r"[^\s:]+: failed to map segment from shared object(?!: )")
_MORE = "free some, or allow more with ulimit -v"


def system_limit(error: BaseException) -> RunError | None:
    """The message where ``error`` is a limit of the machine or of the shell, else None."""
    number = error.errno if isinstance(error, OSError) else None
    text = str(error) if isinstance(error, RuntimeError) else ""  # torch, gloo and Python's own threads have no numbers
    if number in (errno.EMFILE, errno.ENFILE) or os.strerror(errno.EMFILE) in text:
        return _too_few("files are open", resource.RLIMIT_NOFILE, "ulimit -n")
    if number == errno.EAGAIN or os.strerror(errno.EAGAIN) in text or "can't start new thread" in text:
        return _too_few("processes or threads run", resource.RLIMIT_NPROC, "ulimit -u")
    if isinstance(error, ImportError) and (unmapped := _UNMAPPED.search(str(error))):
        return OutOfMemoryError("the host ran out of memory", why=unmapped[0], fix=_MORE)
    refused = isinstance(error, MemoryError) or _ALLOCATOR in text
    if refused or number == errno.ENOMEM:
        why = next(iter(str(error).splitlines()), "") if refused else ""  # how much was asked for
        return OutOfMemoryError("the host ran out of memory", why=why, fix=_MORE)
    if _VERBS in text and os.strerror(errno.ENOMEM) in text:
        why = next(line for line in text.splitlines() if _VERBS in line)
        return InputError("the network may lock too little memory", why=why, fix="allow more: ulimit -l unlimited")
    if number == errno.ENAMETOOLONG:
        return InputError(f"a name is too long for a file: {str(getattr(error, 'filename', ''))[:LONGEST_WORD]}...")
    return None


def _too_few(what: str, limit: int, command: str) -> InputError:
    allowed = resource.getrlimit(limit)[0]
    why = f"{command} allows {allowed}" if allowed != resource.RLIM_INFINITY else "the machine allows no more"
    return InputError(f"too many {what}", why=why, fix=f"allow more: {command} 4096")
