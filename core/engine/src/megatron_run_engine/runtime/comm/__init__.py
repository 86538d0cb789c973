"""Process groups by axis, and their collectives.

A single rank needs no process group: its collectives return at once.
"""

from megatron_run_engine.runtime.comm.gloo import passes_host
from megatron_run_engine.runtime.comm.groups import Channels, Groups, create_aside, create_groups, patience
from megatron_run_engine.runtime.comm.parallel_group import ALONE, ParallelGroup, Pending

__all__ = [
    "ALONE",
    "Channels",
    "Groups",
    "ParallelGroup",
    "Pending",
    "create_aside",
    "create_groups",
    "passes_host",
    "patience",
]
