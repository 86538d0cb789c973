"""Graphs of a device, recorded once and replayed at fixed addresses: CUDA graphs, or tapes on a CPU.

Imports: errors, capture.rules, runtime.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_run_engine.capture.graphs.backend import Backend, Graph, Place, weak_alias

if TYPE_CHECKING:
    from megatron_run_engine.runtime.context import BuildContext

__all__ = ["Backend", "Graph", "Place", "backend_for", "weak_alias"]


def backend_for(context: BuildContext) -> Backend:
    """CUDA graphs on a CUDA device, otherwise tapes."""
    generators = context.rng.streams
    if context.device.type == "cuda":
        from megatron_run_engine.capture.graphs.cuda import CudaBackend

        return CudaBackend(context.device, generators)
    from megatron_run_engine.capture.graphs.tape import TapeBackend

    return TapeBackend(generators)
