"""Graph capture ``te``: regions of layers are recorded and replayed by NVIDIA Transformer Engine.

Reading order: ``library`` (finding it, and what surrounds its captures), ``capture`` (options, entry points for the
engine), ``handover`` (the library's arguments, the checks that it does not make, and wrappers of its results).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron_run.contracts import PluginInfo
from megatron_run.hookspecs import hookimpl
from megatron_run_graph_capture_te.capture import TeCapture, TeOptions, check_config
from megatron_run_graph_capture_te.library import find_engine

if TYPE_CHECKING:
    from megatron_run.contracts import GraphCapture
    from megatron_run_engine.runtime import BuildContext


def check_device(device: str, options: TeOptions) -> None:  # noqa: ARG001  # the contract's
    """Raise :class:`megatron_run.errors.PluginError` if Transformer Engine cannot capture on ``device``."""
    find_engine(torch.device(device))


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Needs a GPU and Transformer Engine."""
    return PluginInfo("graph-capture", "te", options=TeOptions, check_config=check_config, check_device=check_device)


@hookimpl
def megatron_run_create_graph_capture(context: BuildContext, options: TeOptions) -> GraphCapture:
    """Make the capture; the library is imported when something is captured."""
    return TeCapture(context, options, lambda: find_engine(context.device))
