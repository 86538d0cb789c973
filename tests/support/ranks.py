"""Runs a function on several gloo ranks of this machine: one thread each, a time limit, no orphans."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import chdir
from multiprocessing import forkserver, resource_tracker
from typing import Any

from megatron_run_testing.ranks import run_on_ranks
from tests.support.checkout import ROOT

#: Forks from a process that has torch loaded but never used.
CONTEXT = multiprocessing.get_context("forkserver")
#: What every rank would import anew. ``torch._inductor.config`` is loaded by asking for deterministic kernels: seconds;
#: pytest by the file of the function that the ranks run: a tenth of one each.
PRELOADED = [
    "pytest",
    "numpy.testing",
    "torch.distributed",
    "torch._inductor.config",
    "megatron_run_engine.launch.worker",
    "megatron_run_engine.launch.rank",
    "megatron_run_engine.builtin.data.mock",
    "megatron_run_engine.builtin.model.gpt",
    "megatron_run_engine.builtin.observer.console",
    "megatron_run_engine.builtin.optimizer.adamw",
    "megatron_run_cli.__main__",
    "megatron_run_testing.optimizer",
    "megatron_run_testing.parallel_layer",
    "megatron_run_parallel_layer_tensor",
    "megatron_run_schedule_1f1b",
    "tests.support.preloaded",
]
CONTEXT.set_forkserver_preload(PRELOADED)


class RankFailed(AssertionError):
    """A rank raised; the message holds its traceback."""


def run_ranks(function: Callable[..., Any], world: int, *arguments: Any, timeout: float = 120) -> list[Any]:
    """Call ``function(rank, world, *arguments)`` on ``world`` ranks and return their results by rank.

    ``function`` is importable and its arguments and result can be pickled.
    """
    start_server()
    progress = run_on_ranks(_result, world, function, arguments, timeout=timeout)
    for rank, yielded in enumerate(progress.yielded):
        for raised, value in yielded:
            if raised:
                raise RankFailed(f"rank {rank}:\n{value}")
    if progress.failure:
        raise RankFailed(progress.failure)
    return [value for ((_, value),) in progress.yielded]


def _result(
    rank: int, world: int, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> Iterator[tuple[bool, Any]]:
    """What the function returned, or else its traceback, and whether it is one."""
    try:
        yield False, function(rank, world, *arguments)
    except BaseException:
        yield True, traceback.format_exc()
        raise


def start_server() -> None:
    """Start what outlives a test on purpose without the mark by which leftovers are found; it ends with the session."""
    mark = os.environ.pop("TESTED_BY", None)
    resource_tracker.ensure_running()
    with chdir(ROOT):  # from where it finds what it loads of the tests
        forkserver.ensure_running()
    if mark is not None:
        os.environ["TESTED_BY"] = mark
