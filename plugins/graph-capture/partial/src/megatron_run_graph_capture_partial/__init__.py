"""Graph capture ``partial``: chosen segments of each layer are recorded once and replayed.

They become CUDA graphs on a CUDA device, and tapes of operations with the same rules on a CPU. Dynamic segments, such
as the dispatch of tokens to experts, run eagerly in between.

Reading order: ``capture`` (options, entry points for the engine, how often each region is recorded), ``recording`` (in
the order of the run), ``region_graph`` (one region and its autograd function), ``backend``, then ``tape`` with
``arena`` and ``native``, or ``cuda``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_run.contracts import PluginInfo
from megatron_run.hookspecs import hookimpl
from megatron_run_graph_capture_partial.capture import PartialCapture, PartialOptions, check_config
from megatron_run_graph_capture_partial.tape import Executor, TapeBackend, in_python

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

    from megatron_run.contracts import GraphCapture
    from megatron_run_engine.runtime import BuildContext
    from megatron_run_graph_capture_partial.backend import Backend


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Describe the plugin."""
    return PluginInfo("graph-capture", "partial", options=PartialOptions, check_config=check_config)


@hookimpl
def megatron_run_create_graph_capture(context: BuildContext, options: PartialOptions) -> GraphCapture:
    """Make the capture for this rank's device."""
    return PartialCapture(context, options, lambda: backend_for(context, options.executor))


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
