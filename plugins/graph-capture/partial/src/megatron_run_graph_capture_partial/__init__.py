"""Graph capture ``partial``: chosen segments of each layer are recorded once and replayed.

They become CUDA graphs on a CUDA device, and tapes of operations with the same rules on a CPU. Dynamic segments, such
as the dispatch of tokens to experts, run eagerly in between.

Reading order: ``capture`` (options, entry points for the engine, how often each region is recorded), ``recording`` (in
the order of the run), ``region_graph`` (one region and its autograd function), ``backend``, then ``tape`` with
``arena``, or ``cuda``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_run.contracts import PluginInfo
from megatron_run.hookspecs import hookimpl
from megatron_run_engine.capture import backend_for
from megatron_run_graph_capture_partial.capture import PartialCapture, PartialOptions, check_config

if TYPE_CHECKING:
    from megatron_run.contracts import GraphCapture
    from megatron_run_engine.runtime import BuildContext


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Describe the plugin."""
    return PluginInfo("graph-capture", "partial", options=PartialOptions, check_config=check_config)


@hookimpl
def megatron_run_create_graph_capture(context: BuildContext, options: PartialOptions) -> GraphCapture:
    """Make the capture for this rank's device."""
    return PartialCapture(context, options, lambda: backend_for(context))
