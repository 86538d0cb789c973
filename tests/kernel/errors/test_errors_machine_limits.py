"""Limits of the machine are one line each, and other errors none."""

from __future__ import annotations

import errno
import re

import pytest

from megatron_run.errors.machine_limits import system_limit


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (
            OSError(errno.EMFILE, "Too many open files"),
            2,
            r"too many files are open: ulimit -n allows \d+; .*ulimit -n 4096",
        ),
        (OSError(errno.ENFILE, "Too many open files in system"), 2, "too many files are open"),
        (RuntimeError("[enforce fail at socket.cc:24] socket: Too many open files"), 2, "too many files are open"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), 2, "too many processes or threads run"),
        (RuntimeError("can't start new thread"), 2, "allow more: ulimit -u 4096"),
        (RuntimeError("Resource temporarily unavailable"), 2, "allow more: ulimit -u 4096"),  # torch's threads
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 7, "the host ran out of memory"),
        (
            ImportError("libtorch_cpu.so: failed to map segment from shared object"),
            7,
            r"the host ran out of memory: libtorch_cpu\.so: failed to map segment",
        ),
        (
            ImportError("READ THIS!\nOriginal error was: libgfortran.so.5: failed to map segment from shared object\n"),
            7,
            r"the host ran out of memory: libgfortran\.so\.5: failed to map segment from shared object; free",
        ),
        (MemoryError(), 7, "the host ran out of memory; free"),
        (
            MemoryError("Unable to allocate 8 TiB for an array"),
            7,
            "the host ran out of memory: Unable to allocate 8 TiB",
        ),
        (
            RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 80 bytes.\nC++"
            ),
            7,
            r"the host ran out of memory: .* tried to allocate 80 bytes\.; free",
        ),
        (
            RuntimeError("NCCL error\nLast error:\nCall to ibv_create_cq failed with error Cannot allocate memory"),
            2,
            "the network may lock too little memory: Call to ibv_create_cq .*; allow more: ulimit -l unlimited",
        ),
        (
            OSError(errno.ENAMETOOLONG, "File name too long", "a" * 300),
            2,
            "a name is too long for a file: a{200}[.]{3}$",
        ),
    ],
)
def test_what_the_machine_refuses_is_a_line_that_says_what_to_allow(error: Exception, code: int, line: str) -> None:
    known = system_limit(error)
    assert known is not None
    assert known.exit_code == code
    assert re.match(f".*{line}", str(known))


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOENT, "No such file"),
        RuntimeError("a plugin's own: Cannot allocate memory"),
        ValueError("DefaultCPUAllocator"),
        ImportError("_C.so: failed to map segment from shared object: Operation not permitted"),  # mounted with noexec
    ],
)
def test_any_other_error_is_no_limit(error: Exception) -> None:
    assert system_limit(error) is None
