"""The check after each file of tests finds what it should, by name."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_run_engine.host.process import chosen_kernels, rounded_products
from tests.support.census import AS_NEW, Census, switches


def opens_a_file(cleanup: ExitStack) -> None:
    cleanup.callback(os.close, os.open(os.devnull, os.O_RDONLY))


def opens_a_socket(cleanup: ExitStack) -> None:
    cleanup.enter_context(socket.socket())


def starts_a_thread(cleanup: ExitStack) -> None:
    event = threading.Event()
    thread = threading.Thread(target=event.wait, name="a thread of a test")
    thread.start()
    cleanup.callback(thread.join)
    cleanup.callback(event.set)


def shares_memory(cleanup: ExitStack) -> None:
    tensors = [torch.ones(3).share_memory_()]
    cleanup.callback(tensors.clear)


def makes_a_group(cleanup: ExitStack) -> None:
    cleanup.enter_context(mock.patch.object(sys, "excepthook", sys.excepthook))  # which the group replaces
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    cleanup.callback(dist.destroy_process_group)


def handles_a_signal(cleanup: ExitStack) -> None:
    cleanup.callback(signal.signal, signal.SIGUSR2, signal.signal(signal.SIGUSR2, signal.SIG_IGN))


def sets_a_variable(cleanup: ExitStack) -> None:
    os.environ["A_VARIABLE_OF_A_TEST"] = "1"
    cleanup.callback(os.environ.pop, "A_VARIABLE_OF_A_TEST")


@pytest.mark.parametrize(
    ("leave", "named"),
    [
        (opens_a_file, f"descriptors: .* is {os.devnull}, was not there"),
        (opens_a_socket, "descriptors: .* is socket:"),
        (starts_a_thread, "threads: .* is a thread of a test"),
        (shares_memory, "memory: "),
        (makes_a_group, "groups: "),
        (handles_a_signal, "handlers: User defined signal 2 is "),
        (sets_a_variable, "variables: A_VARIABLE_OF_A_TEST is 1, was not there"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_left_is_named_and_nothing_is_once_it_is_closed(leave: Callable[[ExitStack], None], named: str) -> None:
    before = Census.take()
    with ExitStack() as cleanup:
        leave(cleanup)
        left = "\n".join(Census.take().left(before))
        assert re.search(named, left), left
    assert not Census.take().left(before)


def test_a_pool_that_was_shut_down_unawaited_is_waited_for_and_no_other_thread() -> None:
    before, pool, go_on = Census.take(), ThreadPoolExecutor(1), threading.Event()
    pool.submit(go_on.wait)
    pool.shutdown(wait=False)
    assert "threads: " in "\n".join(Census.left_since(before, within=0.01))
    go_on.set()
    assert not Census.left_since(before)


@pytest.mark.parametrize(
    ("within", "switch"),
    [
        (chosen_kernels(True, "cpu"), "deterministic"),
        (rounded_products("medium"), "precision of products"),
        (torch.device("meta"), "default device"),
        (torch.no_grad(), "gradients"),
        (torch.inference_mode(), "inference mode"),
        (torch.autocast("cpu"), "autocast"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_switch_that_is_another_is_named(within: AbstractContextManager[object], switch: str) -> None:
    with within:
        assert switch in {name for name, value in switches().items() if value != AS_NEW[name]}
    assert switches() == AS_NEW
