"""Runs a function in a process of its own where Triton's interpreter runs the kernels, on CPU tensors.

Triton decides when it is imported, and torch imports it with its compiler, so these processes are forked from a server
of their own. The interpreter of Triton 3.6 fails at loops with numpy 2.5; `make te` has both, and compiles the kernels
only.
"""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from typing import Any, TypeVar
from unittest import mock

import pytest

from megatron_run_testing.ranks import by_value, end_process
from tests.support.census import SERVERS
from tests.support.ranks import CONTEXT

T = TypeVar("T")

_SERVER = forkserver.ForkServer()
_SERVER.set_forkserver_preload(["pytest", "torch", "triton", "megatron_run_testing.ranks"])
SERVERS.append(_SERVER)


def interpreted(function: Callable[..., T], *arguments: Any, timeout: float = 240) -> T:
    """The result of ``function`` there: it is importable, and its arguments and result can be pickled.

    Skips the test without Triton.
    """
    pytest.importorskip("triton")
    reader, writer = CONTEXT.Pipe(duplex=False)
    with reader:
        with writer, mock.patch.object(forkserver, "connect_to_new_process", _SERVER.connect_to_new_process):
            _start_server()
            process = CONTEXT.Process(target=_answer, args=(writer, function, arguments))
            process.start()
        try:
            assert reader.poll(timeout), f"no result within {timeout:g} s"
            failure, result = pickle.loads(reader.recv_bytes())
        finally:
            end_process(process)
    assert not failure, failure
    found: T = result
    return found


def _start_server() -> None:
    """It outlives a test on purpose, and so has no mark by which leftovers are found."""
    resource_tracker.ensure_running()
    with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
        os.environ.pop("TESTED_BY", None)
        _SERVER.ensure_running()


def _answer(pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        answer = "", function(*arguments)
    except BaseException:
        answer = traceback.format_exc(), None
    pipe.send_bytes(by_value(answer))
