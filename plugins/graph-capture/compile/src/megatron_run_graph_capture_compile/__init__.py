"""Graph capture ``compile``: chosen segments of each layer are compiled by ``torch.compile``.

Blocks that look alike share one compilation, so start-up does not grow with their number. A region is traced below
autograd, while its own Python runs; what is compiled are operations on tensors only. Weight gradients leave the
compiled backward as their operands, and the accumulator multiplies them, at once or in action W.

Reading order: ``capture`` (the entry points for the engine), ``graph_trace`` (a region as graphs), ``compiled`` (the
cut into forward and backward, and the autograd function), ``compiler``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron_run.contracts import PluginInfo
from megatron_run.hookspecs import hookimpl
from megatron_run_graph_capture_compile.capture import CompileCapture, CompileOptions, check_config, check_recorded
from megatron_run_graph_capture_compile.compiler import check_compiler, find_compiler

if TYPE_CHECKING:
    from megatron_run.contracts import GraphCapture
    from megatron_run_engine.runtime import BuildContext


def check_device(device: str, options: CompileOptions) -> None:
    """Raise :class:`megatron_run.errors.PluginError` if nothing can be compiled, or recorded, for ``device``."""
    check_compiler(torch.device(device), options.backend)
    check_recorded(torch.device(device), options)


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Describe the plugin."""
    return PluginInfo(
        "graph-capture", "compile", options=CompileOptions, check_config=check_config, check_device=check_device
    )


@hookimpl
def megatron_run_create_graph_capture(context: BuildContext, options: CompileOptions) -> GraphCapture:
    """Make the capture; the compiler is imported when something is compiled."""
    return CompileCapture(context, options, lambda: find_compiler(options.backend, options.mode))
