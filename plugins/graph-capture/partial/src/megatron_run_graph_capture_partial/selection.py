"""Chooses the backend of a device and the executor of its tapes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_run_graph_capture_partial.executors import in_python
from megatron_run_graph_capture_partial.tape import Executor, TapeBackend

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

    from megatron_run_engine.runtime.context import BuildContext
    from megatron_run_graph_capture_partial.backend import Backend


def backend_for(context: BuildContext, executor: str) -> Backend:
    """CUDA graphs on a CUDA device, otherwise tapes, which ``executor`` replays."""
    generators = context.rng.streams
    if context.device.type == "cuda":
        from megatron_run_graph_capture_partial.cuda import CudaBackend

        return CudaBackend(context.device, generators)
    return TapeBackend(generators, find_executor(executor, context.log, context.groups.activity.heartbeat))


def find_executor(name: str, log: logging.Logger, heartbeat: Callable[[], None]) -> Executor:
    """The executor ``name``; if the native one cannot be built, a warning and the one in Python."""
    if name == "native":
        from megatron_run_graph_capture_partial.native import build  # it imports the compiler's tools

        try:
            return build(log, heartbeat)
        except Exception as cause:  # no compiler, no headers, a read-only folder: Python always works
            first = next(iter(str(cause).splitlines()), "")
            log.warning("the native executor of tapes cannot be built, Python replays: %s", first)
    return in_python
