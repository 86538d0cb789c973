"""Runs a function in a fresh process with another environment, to see what a plugin takes from its own."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from megatron_run.registry.hooks import in_one_line
from megatron_run_engine.runtime.cuda_libraries import variables_kept
from megatron_run_testing import CheckFailed
from megatron_run_testing.ranks import by_value, end_process

T = TypeVar("T")


class NotSendableError(Exception):
    """The function, or one of its arguments, cannot be sent to another process."""


def another_rank() -> dict[str, str]:
    """The differences in the environment of another rank: its place, and with it the seed of ``hash`` of texts."""
    rank = "2" if os.environ.get("RANK") == "3" else "3"
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"  # most processes have a random one
    return {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "4", "PYTHONHASHSEED": seed}


def process_with(environment: Mapping[str, str]) -> str:
    """How to speak of a process that has ``environment``."""
    return f"in a process with {' '.join(f'{name}={value}' for name, value in environment.items())}"


def run_elsewhere(
    work: Callable[..., T], environment: Mapping[str, str], *arguments: object, timeout: float = 120.0
) -> T:
    """Call ``work(*arguments)`` in a new Python that has ``environment`` beside this one's, and return its result.

    Functions and classes must be importable, or :class:`NotSendableError` is raised. What ``work`` raises, and its end
    without a result within ``timeout`` seconds, is raised as :class:`CheckFailed`.
    """
    context = multiprocessing.get_context("spawn")  # a fork would have this process's seed of hash()
    reader, writer = context.Pipe(duplex=False)
    where = process_with(environment)
    with reader, ExitStack() as cleanup:
        with writer:  # only the process's copy stays open, so that its end is seen as the end of the pipe
            process = context.Process(
                target=_work, args=(writer, sys.dont_write_bytecode, work, arguments), daemon=True
            )
            _start(process, environment)
        cleanup.callback(end_process, process)
        if not reader.poll(timeout):
            raise CheckFailed(f"{where} it takes longer than {timeout:g} s")
        try:
            failure, result = reader.recv()
        except EOFError:
            raise CheckFailed(f"{where} it ends the process, or cannot be imported") from None
    if failure:
        raise CheckFailed(f"{where}: {failure}")
    found: T = result
    return found


def _start(process: multiprocessing.process.BaseProcess, environment: Mapping[str, str]) -> None:
    """Start ``process`` with ``environment``, which it inherits. Raises :class:`NotSendableError`."""
    with variables_kept(*environment):
        os.environ.update(environment)
        try:
            process.start()
        except OSError:
            raise
        except Exception as cause:  # of several types, for what has no name to be imported by
            raise NotSendableError(f"it cannot be sent to another process: {in_one_line(cause)}") from cause


def _work(writer: Connection, dont_write_bytecode: bool, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    sys.dont_write_bytecode = dont_write_bytecode
    try:
        answer = "", work(*arguments)
    except Exception as cause:
        answer = in_one_line(cause), None
    writer.send_bytes(by_value(answer))
